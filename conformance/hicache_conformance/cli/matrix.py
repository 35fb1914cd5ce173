"""`hicache-conformance matrix A.json B.json ...`: show the outcome of each rule on several stores."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

SUMMARY = "Show several runs side by side, as a Markdown table with a row for each rule."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument(
        "records", type=Path, nargs="+", metavar="FILE", help="result.json of a run, or its summary"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the table and return 0."""
    from hicache_conformance.report.matrix import matrix  # noqa: PLC0415
    from hicache_conformance.report.summary import Summary  # noqa: PLC0415

    sys.stdout.write(matrix([Summary.read(path) for path in arguments.records]))
    return 0
