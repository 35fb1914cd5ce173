"""The kit tested on stores whose verdict is known: wrong ones must be caught, right ones must pass.

A rule that no wrong store fails proves nothing, and one that a right store fails is worse than none.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.checks import all_checks
from hicache_conformance.rules import RULES
from hicache_conformance.run.isolation import CheckProcess, in_lanes
from hicache_conformance.run.outcomes import Outcome, Unknown, combined
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.selftest.mutants import Mutant, all_mutants
from hicache_conformance.selftest.references.subjects import must_pass, must_skip, subject_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_conformance.report.record import CheckRecord
    from hicache_conformance.tools.processes.child import Link

_LIMIT_S = 900.0
_TRIES = 3
_RENEWED_AFTER = 25
_WRONG = {Outcome.FAILED, Outcome.ERROR, Outcome.UNKNOWN}


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one store and one rule."""

    store: str
    fault: str
    """What is wrong with the store; empty for a right one."""
    rule_id: str
    as_it_should: bool
    by: str
    """The check that decided."""
    message: str


def rules_without_mutants() -> list[str]:
    """The rules that no control is there for."""
    covered = {rule_id for control in all_mutants() for rule_id in control.rule_ids}
    return [rule_id for rule_id in RULES if rule_id not in covered]


def findings(
    options: RunOptions, *, wrongs: bool = True, rights: bool = True, lanes: int | None = None
) -> Iterator[Finding]:
    """Every right store against all rules, then every control against each of its own.

    Several processes share the work, more than there are processors: most of it is waiting. None is used
    for long: a control may leave threads that hang. A control that survives among others is tried once
    more alone: threads race differently on a machine that is not busy.
    """
    jobs: list[_Job] = []
    if rights:
        jobs += [_Job("right", subject.__name__) for subject in must_pass()]
        jobs.append(_Job("skips"))
    if wrongs:
        jobs += [_Job("wrong", control.name) for control in all_mutants()]
    asked: Counter[CheckProcess] = Counter()

    def work(lane: CheckProcess, job: _Job) -> list[Finding]:
        asked[lane] += 1
        found = _asked(lane, job)
        if job.kind != "wrong" or asked[lane] % _RENEWED_AFTER == 0 or _hung(found):
            lane.renew()
        return found

    made = partial(CheckProcess, _answer, options)
    again: list[_Job] = []
    many = in_lanes(made, work, jobs, lanes or 3 * (os.cpu_count() or 1))
    for job, found in zip(jobs, many, strict=True):
        if job.kind == "wrong" and survivors(found):
            again.append(job)
        else:
            yield from found
    for found in in_lanes(made, work, again, 1):
        yield from found


@dataclass(frozen=True, slots=True)
class _Job:
    """One store for a process."""

    kind: str
    name: str = ""


def _asked(lane: CheckProcess, job: _Job) -> list[Finding]:
    try:
        found: list[Finding] = lane.ask(job, _LIMIT_S)
    except (EOFError, Unknown) as error:
        lane.renew()
        message = f"no answer: {type(error).__name__} {error}"
        return [Finding(job.name, "", "", as_it_should=False, by="", message=message)]
    return found


def _hung(found: Sequence[Finding]) -> bool:
    return any("did not return" in one.message or not one.as_it_should for one in found)


def _answer(link: Link, options: RunOptions) -> None:
    """The actor: judge the stores that are named."""
    answers = {"wrong": _wrong_findings, "right": _right_findings, "skips": _skip_findings}
    while True:
        job: _Job = link.receive()
        link.send(answers[job.kind](job.name, options))


def _wrong_findings(name: str, options: RunOptions) -> list[Finding]:
    control = next(one for one in all_mutants() if one.name == name)
    return [killed(control, rule_id, options) for rule_id in control.rule_ids]


def killed(control: Mutant, rule_id: str, options: RunOptions) -> Finding:
    """Whether any check of the rule fails the control, in a few tries where threads race."""
    subject = control.subject or subject_of(control.storage_class)
    checks = [
        check
        for check in all_checks()
        if check.rule.id == rule_id and (check.quick or not options.quick)
    ]
    checks.sort(key=lambda check: check.run.__name__ != control.check)
    last = ""
    for attempt in range(_TRIES):
        tried = replace(options, seed=options.seed + attempt)
        for check in checks:
            record = run_check(subject, check, tried)
            if record.outcome is Outcome.FAILED:
                by, message = check.run.__name__, record.message
                return Finding(control.name, control.fault, rule_id, True, by, message)
            last = f"{record.outcome.value} {record.message}".strip()
    return Finding(control.name, control.fault, rule_id, False, "", f"survives: {last}")


def _right_findings(name: str, options: RunOptions) -> list[Finding]:
    subject = next(one for one in must_pass() if one.__name__ == name)
    store = subject.storage_class.__name__
    records = [
        run_check(subject, check, options)
        for check in all_checks()
        if check.quick or not options.quick
    ]
    wrong = [record for record in records if record.outcome in _WRONG]
    passed = sum(record.outcome is Outcome.PASSED for record in records)
    accusations = [_accused(store, record) for record in wrong]
    message = f"{passed} of {len(records)} checks passed"
    return accusations or [Finding(store, "", "all", as_it_should=True, by="", message=message)]


def _accused(store: str, record: CheckRecord) -> Finding:
    rule_id, _, by = record.name.partition(":")
    message = " ".join(f"{record.outcome.value}: {record.message} {record.got}".split())
    return Finding(store, "", rule_id, as_it_should=False, by=by, message=message)


def _skip_findings(_: str, options: RunOptions) -> list[Finding]:
    """What is not claimed, or has no back door, is told so: neither passed nor failed."""
    found: list[Finding] = []
    for subject, rule_id, outcome in must_skip():
        checks = [check for check in all_checks() if check.rule.id == rule_id]
        outcomes = {run_check(subject, check, options).outcome for check in checks}
        message = f"{', '.join(sorted(outcomes))}; {outcome} is right"
        name = subject.storage_class.__name__
        found.append(Finding(name, "", rule_id, combined(outcomes) is outcome, "", message))
    return found


def survivors(found: Sequence[Finding]) -> list[Finding]:
    """Those that did not come out as they should."""
    return [one for one in found if not one.as_it_should]
