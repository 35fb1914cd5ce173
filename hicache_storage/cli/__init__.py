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

TYPE_CHECKING = False  # Ctrl-C is not caught yet, so import as little as possible
if TYPE_CHECKING:
    from collections.abc import Sequence

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb, and return its exit code. `--help` raises SystemExit, as in argparse."""
    try:
        from hicache_storage.cli.verbs import HICACHE  # noqa: PLC0415 - Ctrl-C may come meanwhile

        return HICACHE.main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return _INTERRUPTED
