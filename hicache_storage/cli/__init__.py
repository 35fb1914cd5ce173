"""`hicache`: the command line. One module a verb; nothing heavy is imported before a verb runs.

Exit codes: 0; 1 for a run that found corrupt pages; 2 for input that is wrong, with one line on stderr;
128 and the signal's number for a run that a signal ended.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hicache_storage.cli import backends, replay
from hicache_storage.cli.program import Program

if TYPE_CHECKING:
    from collections.abc import Sequence

_HICACHE = Program(
    name="hicache", description="KV-cache storage for LLM servers.", verbs=(backends, replay)
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; its exit code. `--help` leaves with SystemExit, as argparse does."""
    return _HICACHE.main(sys.argv[1:] if argv is None else argv)
