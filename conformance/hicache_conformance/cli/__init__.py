"""`hicache-conformance`: test a store, or the kit itself. Each verb has a module.

Exit codes: 0 conformant, 1 failed, 2 partial, 3 inconclusive. Wrong input exits with 3 too, and
prints one line on stderr. Ctrl-C exits with 130.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # Ctrl-C is not caught yet, so import as little as possible
if TYPE_CHECKING:
    from collections.abc import Sequence

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code. `--help` raises SystemExit, as in argparse."""
    try:
        from hicache_conformance.cli.verbs import HICACHE_CONFORMANCE  # noqa: PLC0415 - Ctrl-C may come

        return HICACHE_CONFORMANCE.main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return _INTERRUPTED
