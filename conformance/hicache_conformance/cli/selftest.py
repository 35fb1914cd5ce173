"""`hicache-conformance selftest`: the kill matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from hicache_conformance.selftest.selftest import Finding

SUMMARY = "Test the kit: each wrong store must be caught by its rule, each right one must pass."
_CALL_LIMIT_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's flags."""
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything random")
    parser.add_argument("--quick", action="store_true", help="with the quick checks only")
    parser.add_argument(
        "--wrong-only", action="store_true", help="leave out the right stores, which take longer"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the matrix; 1 where a wrong store survives, a right one fails, a rule has no control."""
    from rich.console import Console  # noqa: PLC0415 - `--help` is quick

    from hicache_conformance.run.runner import RunOptions  # noqa: PLC0415
    from hicache_conformance.selftest.selftest import findings, rules_without_mutants, survivors  # noqa: PLC0415

    options = RunOptions(seed=arguments.seed, quick=arguments.quick, call_limit_s=_CALL_LIMIT_S)
    console = Console(highlight=False, soft_wrap=True)
    found: list[Finding] = []
    for one in findings(options, rights=not arguments.wrong_only):
        found.append(one)
        console.print(_line(one), markup=False)
    wrong, bare = survivors(found), rules_without_mutants()
    for one in wrong:
        console.print(f"NOT AS IT SHOULD BE  {_line(one)}", markup=False)
    if bare:
        console.print(f"rules without a control: {', '.join(bare)}")
    controls = len({one.store for one in found if one.fault})
    console.print(
        f"{controls} wrong stores, {len(found)} findings, {len(wrong)} not as they should be"
    )
    return 1 if wrong or bare else 0


def _line(one: Finding) -> str:
    mark = ("killed" if one.fault else "right ") if one.as_it_should else "WRONG "
    by = f" by {one.by}" if one.by else ""
    return f"{mark} {one.rule_id:7} {one.store}{by}: {one.fault or one.message}"
