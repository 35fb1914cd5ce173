"""`hicache-conformance`: test a store, or the kit itself. Each verb has a module.

Exit codes: 0 conformant, 1 failed, 2 partial, 3 inconclusive. Wrong input exits with 3 too, and
prints one line on stderr.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hicache_conformance.cli import compare, matrix, new, rules, run, selftest
from hicache_storage.cli.program import Program

if TYPE_CHECKING:
    from collections.abc import Sequence

_HICACHE_CONFORMANCE = Program(
    name="hicache-conformance",
    description="Test a KV-cache store by the rules of the storage contract. A cache may forget; it"
    " may never lie.",
    verbs=(run, new, selftest, compare, matrix, rules),
    default=run,
    wrong_input=3,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code. `--help` raises SystemExit, as in argparse."""
    return _HICACHE_CONFORMANCE.main(sys.argv[1:] if argv is None else argv)
