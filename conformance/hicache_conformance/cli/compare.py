"""`hicache-conformance compare A.json B.json`: show what changed between two runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

SUMMARY = "Show what changed between two runs; exit code 1 if something became worse."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument("before", type=Path, metavar="A.json", help="result.json of the older run")
    parser.add_argument("after", type=Path, metavar="B.json", help="result.json of the newer run")


def run(arguments: argparse.Namespace) -> int:
    """Compare two runs. Return 1 if anything became worse."""
    from hicache_conformance.report.compare import compare, print_comparison  # noqa: PLC0415
    from hicache_conformance.report.record import Record  # noqa: PLC0415

    comparison = compare(Record.read(arguments.before), Record.read(arguments.after))
    print_comparison(comparison)
    return 1 if comparison.regressed else 0
