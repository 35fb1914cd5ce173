"""`hicache`: the command line. Each verb has a module, which imports heavy libraries when it runs.

| exit code    | meaning                                    |
|--------------|--------------------------------------------|
| 0            | success                                    |
| 1            | the verb found something wrong             |
| 2            | invalid input, with one line on stderr     |
| 128 + signal | a signal ended the run                     |
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hicache_storage.cli import (
    backends,
    bench,
    copy,
    diff,
    doctor,
    explain,
    gc,
    inspect,
    ls,
    plan,
    replay,
    rm,
    stats,
    verify,
)
from hicache_storage.cli.program import Program

if TYPE_CHECKING:
    from collections.abc import Sequence

_HICACHE = Program(
    name="hicache",
    description="KV-cache storage for LLM servers.",
    verbs=(
        backends,
        plan,
        replay,
        ls,
        stats,
        inspect,
        verify,
        rm,
        gc,
        copy,
        diff,
        bench,
        doctor,
        explain,
    ),
    has_log_flags=True,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb, and return its exit code. `--help` raises SystemExit, as in argparse."""
    return _HICACHE.main(sys.argv[1:] if argv is None else argv)
