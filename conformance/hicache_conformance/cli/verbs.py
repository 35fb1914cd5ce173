"""The verbs of `hicache-conformance`, in the order of `--help`."""

from __future__ import annotations

from hicache_conformance.cli import compare, matrix, new, rules, run, selftest
from hicache_storage.cli.program import Program

HICACHE_CONFORMANCE = Program(
    name="hicache-conformance",
    description="Test a KV-cache store by the rules of the storage contract. A cache may forget; it"
    " may never lie.",
    verbs=(run, new, selftest, compare, matrix, rules),
    default=run,
    wrong_input=3,
)
