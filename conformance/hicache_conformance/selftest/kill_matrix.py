"""The kill matrix in docs/kill-matrix.md: every mutant against every check of its rules."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from hicache_conformance.checks import all_checks
from hicache_conformance.rules import RULES
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.runner import run_check
from hicache_conformance.selftest.mutants import all_mutants, mutant_named
from hicache_conformance.selftest.selftest import (
    Finding,
    Job,
    run_jobs,
    selected_checks,
    subject_for,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hicache_conformance.run.runner import RunOptions

Kills = dict[str, frozenset[str]]
"""By the full name of each check, the names of the mutants that it catches."""

_HEAD = """# The kill matrix

This page lists each check of the kit with the wrong stores ("mutants") that it catches. `make
kill-matrix` generates it, and runs each mutant once against all checks of its rules.
`hicache-conformance selftest` asserts the pairs in **bold**. The other pairs were caught in the run that
made this page; those that depend on a race may differ in the next one. The last column names the
mutants that no other check catches.
"""


def kill_matrix(options: RunOptions, processes: int | None = None) -> Iterator[Finding]:
    """Yield one finding for every mutant and every check of its rules."""
    jobs = [Job(_all_findings, mutant.name) for mutant in all_mutants()]
    for found in run_jobs(jobs, options, processes):
        yield from found


def kills_in(found: list[Finding]) -> Kills:
    """Return the mutants that each check caught."""
    kills: defaultdict[str, set[str]] = defaultdict(set)
    for one in found:
        if one.as_expected:
            kills[one.check].add(one.store)
    return {check: frozenset(names) for check, names in kills.items()}


def kill_matrix_page(kills: Mapping[str, frozenset[str]]) -> str:
    """Return the page in Markdown: a table for each rule, then a table of the mutants."""
    caught = _checks_of_mutants(kills)
    parts = [_HEAD]
    for rule in RULES.values():
        parts.append(
            f"\n## {rule.id} · {rule.title}\n\n| check | catches | alone catches |\n|---|---|---|\n"
        )
        parts += [
            _check_row(check.name, kills.get(check.name, frozenset()), caught)
            for check in all_checks()
            if check.rule.id == rule.id
        ]
    parts.append("\n## Mutants\n\n| mutant | defect | seen in |\n|---|---|---|\n")
    parts += [f"| `{one.name}` | {one.fault} | {one.seen_in} |\n" for one in all_mutants()]
    return "".join(parts)


def read_kill_matrix(page: str) -> Kills:
    """Return the pairs of check and mutant that a kill-matrix page shows."""
    kills: Kills = {}
    for section in re.split(r"(?m)^## ", page)[1:]:
        rule_id = section.split(" ", 1)[0]
        for row in re.findall(r"(?m)^\| `(\w+)` \| (.*) \| .* \|$", section):
            if rule_id in RULES:
                kills[f"{rule_id}:{row[0]}"] = frozenset(re.findall(r"`(\w+)`", row[1]))
    return kills


def _check_row(name: str, mutants: frozenset[str], caught: Mapping[str, set[str]]) -> str:
    cells = [
        f"**`{one.name}`**" if name in one.checks else f"`{one.name}`"
        for one in all_mutants()
        if one.name in mutants or name in one.checks
    ]
    alone = [f"`{one.name}`" for one in all_mutants() if caught.get(one.name) == {name}]
    return f"| `{name.partition(':')[2]}` | {', '.join(cells)} | {', '.join(alone)} |\n"


def _checks_of_mutants(kills: Mapping[str, frozenset[str]]) -> dict[str, set[str]]:
    caught = {mutant.name: set(mutant.checks) for mutant in all_mutants()}
    for check, names in kills.items():
        for name in names & set(caught):
            caught[name].add(check)
    return caught


def _all_findings(name: str, options: RunOptions) -> list[Finding]:
    mutant = mutant_named(name)
    found: list[Finding] = []
    for check in selected_checks(options):
        if check.rule.id in mutant.rule_ids:
            record = run_check(subject_for(mutant), check, options)
            failed = record.outcome is Outcome.FAILED
            found.append(Finding(mutant.name, mutant.fault, check.name, failed, record.message))
    return found
