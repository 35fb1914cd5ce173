"""`hicache-conformance selftest`: run the kit on wrong and right stores, and make the kill matrix."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from hicache_conformance.run.runner import RunOptions
    from hicache_conformance.selftest.selftest import Finding

SUMMARY = "Test the kit: its checks must catch each wrong store, and each correct one must pass."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of everything random"
    )
    parser.add_argument("--quick", action="store_true", help="run only the quick checks")
    parser.add_argument(
        "--wrong-only", action="store_true", help="leave out the correct stores, which take longer"
    )
    parser.add_argument(
        "--matrix",
        type=Path,
        metavar="FILE",
        help="run every wrong store against every check of its rules instead, and write the table",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the verb. Return 1 if a wrong store survives, a right one fails, or a check has no mutant."""
    from rich.console import Console  # noqa: PLC0415 - `--help` is quick

    from hicache_conformance.run.runner import RunOptions  # noqa: PLC0415
    from hicache_conformance.selftest.selftest import CALL_LIMIT_S  # noqa: PLC0415

    options = RunOptions(seed=arguments.seed, quick=arguments.quick, call_limit_s=CALL_LIMIT_S)
    console = Console(highlight=False, soft_wrap=True)
    if arguments.matrix:
        return _write_matrix(arguments.matrix, options, console)
    return _selftest(options, console, rights=not arguments.wrong_only)


def _selftest(options: RunOptions, console: Console, *, rights: bool) -> int:
    from hicache_conformance.selftest.references.subjects import must_pass  # noqa: PLC0415
    from hicache_conformance.selftest.selftest import (  # noqa: PLC0415
        checks_without_mutants,
        findings,
        survivors,
    )

    found: list[Finding] = []
    for one in findings(options, rights=must_pass() if rights else ()):
        found.append(one)
        console.print(_line(one), markup=False)
    wrong, bare = survivors(found), checks_without_mutants()
    for one in wrong:
        console.print(f"NOT AS EXPECTED  {_line(one)}", markup=False)
    if bare:
        console.print(f"checks without a wrong store: {', '.join(bare)}")
    mutants = len({one.store for one in found if one.fault})
    console.print(f"{mutants} wrong stores, {len(found)} findings, {len(wrong)} not as expected")
    return 1 if wrong or bare else 0


def _write_matrix(path: Path, options: RunOptions, console: Console) -> int:
    from hicache_conformance.selftest.kill_matrix import (  # noqa: PLC0415
        kill_matrix,
        kill_matrix_page,
        kills_in,
    )

    found: list[Finding] = []
    for one in kill_matrix(options):
        found.append(one)
        if one.as_expected:
            console.print(_line(one), markup=False)
    path.write_text(kill_matrix_page(kills_in(found)), encoding="utf-8")
    console.print(f"{path}: {sum(one.as_expected for one in found)} of {len(found)} pairs caught")
    return 0


def _line(one: Finding) -> str:
    mark = ("killed" if one.fault else "right ") if one.as_expected else "WRONG "
    return f"{mark} {one.store} by {one.check}: {one.fault or one.message}"
