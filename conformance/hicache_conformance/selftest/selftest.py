"""Tests of the kit itself: each mutant must be caught, and each right store must pass.

A check that fails no wrong store proves nothing, and one that fails a right store is worse than
none.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.checks import Check, all_checks
from hicache_conformance.run.isolation import CheckProcess, map_in_processes
from hicache_conformance.run.outcomes import Outcome, Unknown, combined
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.selftest.mutants import Mutant, all_mutants, mutant_named
from hicache_conformance.selftest.references.subjects import must_come_to, must_pass, subject_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache_conformance.report.record import CheckRecord
    from hicache_conformance.run.subject import Subject
    from hicache_conformance.tools.processes.child import Link

CALL_LIMIT_S = 10.0
"""If a call of a mutant takes this long, it hangs. The right stores have as long as any store."""
_LIMIT_S = 900.0
_TRIES = 3
_RENEWED_AFTER = 25
_WRONG = {Outcome.FAILED, Outcome.ERROR, Outcome.UNKNOWN}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check on one mutant, or of all checks on one right store."""

    store: str
    fault: str
    """The defect of the store; empty for a right store."""
    check: str
    """For a mutant, the full name of the check; for a right store, a rule or "all"."""
    as_expected: bool
    message: str


def findings(
    options: RunOptions,
    *,
    wrongs: bool = True,
    rights: Sequence[type[Subject]] = must_pass(),
    processes: int | None = None,
) -> Iterator[Finding]:
    """Yield the findings of the right stores on all checks, and of every mutant on its own checks.

    If a mutant survives while others run, it is tried once more alone, because threads race
    differently on a machine that is not busy.
    """
    jobs: list[Job] = []
    if rights:
        jobs += [Job(_right_findings, subject.__name__) for subject in rights]
        jobs.append(Job(_outcome_findings))
    if wrongs:
        jobs += [Job(_mutant_findings, mutant.name) for mutant in all_mutants()]
    again: list[Job] = []
    for job, found in zip(jobs, run_jobs(jobs, options, processes), strict=True):
        if survivors(found) and job.work is _mutant_findings:
            again.append(job)
        else:
            yield from found
    for found in run_jobs(again, options, 1):
        yield from found


def survivors(found: Sequence[Finding]) -> list[Finding]:
    """Return the findings that are not as expected."""
    return [one for one in found if not one.as_expected]


def checks_without_mutants() -> list[str]:
    """Return the names of the checks for which there is no mutant."""
    covered = {check for mutant in all_mutants() for check in mutant.checks}
    return [check.name for check in all_checks() if check.name not in covered]


# --- processes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """The work on one store, done by one process."""

    work: Callable[[str, RunOptions], list[Finding]]
    store: str = ""


def run_jobs(
    jobs: Sequence[Job], options: RunOptions, processes: int | None = None
) -> Iterator[list[Finding]]:
    """Yield the findings of each job, in order.

    Several processes share the work, more than there are processors, because most of it is waiting.
    After a mutant that hung, the process is replaced, because its threads may still hang.
    """
    done: Counter[CheckProcess] = Counter()

    def work(process: CheckProcess, job: Job) -> list[Finding]:
        done[process] += 1
        found = _requested(process, job)
        if job.work is not _mutant_findings or done[process] % _RENEWED_AFTER == 0 or _hung(found):
            process.renew()
        return found

    make_process = partial(CheckProcess, _run_jobs, options)
    yield from map_in_processes(make_process, work, jobs, processes or 3 * (os.cpu_count() or 1))


def _requested(process: CheckProcess, job: Job) -> list[Finding]:
    try:
        found: list[Finding] = process.request(job, _LIMIT_S)
    except (EOFError, Unknown) as error:
        process.renew()
        message = f"no answer: {type(error).__name__} {error}"
        return [Finding(job.store, "", "", as_expected=False, message=message)]
    return found


def _hung(found: Sequence[Finding]) -> bool:
    return any("did not return" in one.message or not one.as_expected for one in found)


def _run_jobs(link: Link, options: RunOptions) -> None:
    """Do each job that the parent sends (the actor of a process)."""
    while True:
        job: Job = link.receive()
        link.send(job.work(job.store, options))


# --- mutants -----------------------------------------------------------------------------------------


def _mutant_findings(name: str, options: RunOptions) -> list[Finding]:
    mutant = mutant_named(name)
    checks = [check for check in selected_checks(options) if check.name in mutant.checks]
    return [killed(mutant, check, options) for check in checks]


def killed(mutant: Mutant, check: Check, options: RunOptions) -> Finding:
    """Return the finding of one check on one mutant. If threads race, the check has a few tries."""
    last = ""
    for attempt in range(_TRIES):
        record = run_check(
            subject_for(mutant), check, replace(options, seed=options.seed + attempt)
        )
        if record.outcome is Outcome.FAILED and _says(mutant, record):
            return Finding(mutant.name, mutant.fault, check.name, True, record.message)
        survives = "survives" if record.outcome is not Outcome.FAILED else "killed in other words"
        last = f"{survives}: {record.outcome.value} {record.message} {record.got}".strip()
    return Finding(mutant.name, mutant.fault, check.name, False, last)


def _says(mutant: Mutant, record: CheckRecord) -> bool:
    if not mutant.says:
        return True
    found = re.search(mutant.says, f"{record.message} {record.got}")
    return found is not None and bool(record.sequence)


def selected_checks(options: RunOptions) -> list[Check]:
    """Return the checks that run with these options."""
    return [check for check in all_checks() if check.quick or not options.quick]


def subject_for(mutant: Mutant) -> type[Subject]:
    """Return the subject of a mutant: its own, or the subject of the store that it derives from."""
    return mutant.subject or subject_of(mutant.storage_class)


# --- right stores ------------------------------------------------------------------------------------


def _right_findings(name: str, options: RunOptions) -> list[Finding]:
    subject = next(one for one in must_pass() if one.__name__ == name)
    store = subject.storage_class.__name__
    options = replace(options, call_limit_s=RunOptions().call_limit_s)
    records = [run_check(subject, check, options) for check in selected_checks(options)]
    wrong = [record for record in records if record.outcome in _WRONG]
    passed = sum(record.outcome is Outcome.PASSED for record in records)
    message = f"{passed} of {len(records)} checks passed"
    return [_false_alarm(store, record) for record in wrong] or [
        Finding(store, "", "all", as_expected=True, message=message)
    ]


def _false_alarm(store: str, record: CheckRecord) -> Finding:
    message = " ".join(f"{record.outcome.value}: {record.message} {record.got}".split())
    return Finding(store, "", record.name, as_expected=False, message=message)


def _outcome_findings(_: str, options: RunOptions) -> list[Finding]:
    """Return a finding for each rule whose outcome on a store is known in advance."""
    found: list[Finding] = []
    for subject, rule_id, outcome in must_come_to():
        checks = [check for check in all_checks() if check.rule.id == rule_id]
        outcomes = {run_check(subject, check, options).outcome for check in checks}
        message = f"{', '.join(sorted(outcomes))}; {outcome} is right"
        name = subject.storage_class.__name__
        found.append(Finding(name, "", rule_id, combined(outcomes) is outcome, message))
    return found
