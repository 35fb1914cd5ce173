"""The verdict on a store, from the outcomes of its checks."""

from __future__ import annotations

import platform
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

from hicache_conformance.report.record import (
    CapabilityRecord,
    CheckRecord,
    Record,
    RuleRecord,
    RunRecord,
    SubjectRecord,
)
from hicache_conformance.report.redact import Redactor
from hicache_conformance.rules import SPEC, Level, Rule
from hicache_conformance.run.outcomes import Outcome, Verdict, combined
from hicache_conformance.run.waivers import Waiver, apply_waiver
from hicache_storage.storage import describe

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterable, Mapping, Sequence

    from hicache_storage.storage import Capabilities, HiCacheStorage

DISTRIBUTION = "hicache-storage"

_EVIDENCE = {
    "retention": ("KV-002", "KV-901"),
    "durability": ("KV-401", "KV-402"),
    "shared": ("KV-502",),
    "enumerable": ("KV-103", "KV-104"),
    "overwrites": ("KV-005",),
    "scatter_gather": ("KV-008",),
    "alignment": ("KV-008",),
    "parallelism": ("KV-504",),
    "max_batch": ("KV-204", "KV-903"),
    "max_page_nbytes": ("KV-008", "KV-903"),
    "bounded": ("KV-304", "KV-901"),
    "revocable": ("KV-901",),
}
"""The rules that show whether a claim is true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The facts of a run beside the outcomes of its checks."""

    name: str
    storage_class: type[HiCacheStorage]
    claims: Capabilities | None
    """None where no storage could be opened."""
    absent: Mapping[str, str] = field(default_factory=dict[str, str])
    """The operations that the store was not written for: `Subject.absent`."""
    store_facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """The store's words about itself, by topic."""
    problem: str = ""
    """The reason why none could be opened."""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    started_at: dt.datetime
    elapsed_s: float
    seed: int = 0
    quick: bool = False
    strict: bool = False
    selection: tuple[str, ...] = ()
    spec: str = SPEC
    command: str = ""


def make_record(
    facts: RunFacts,
    rules: Sequence[Rule],
    checks: Iterable[CheckRecord],
    waivers: Mapping[str, Waiver],
) -> Record:
    """Return the record of a run, with its verdict and without secrets."""
    by_rule: defaultdict[str, list[CheckRecord]] = defaultdict(list)
    for check in checks:
        by_rule[check.name.partition(":")[0]].append(check)
    records = tuple(apply_waiver(_rule_record(r, by_rule[r.id]), waivers) for r in rules)
    verdict, reasons = _verdict(records, strict=facts.strict)
    if verdict in (Verdict.CONFORMANT, Verdict.PARTIAL):
        reasons += _untested(records)
    if facts.absent and verdict in (Verdict.CONFORMANT, Verdict.PARTIAL):
        verdict = Verdict.PARTIAL
        reasons += [f"{name}: {words}" for name, words in facts.absent.items()]
    if facts.problem:
        verdict, reasons = Verdict.INCONCLUSIVE, [facts.problem]
    record = Record(
        subject=_subject(facts, records),
        run=_run(facts),
        verdict=verdict,
        reasons=tuple(reasons),
        rules=records,
    )
    return Redactor.of(facts.config).record(record)


def _rule_record(rule: Rule, checks: Sequence[CheckRecord]) -> RuleRecord:
    return RuleRecord(
        id=rule.id,
        title=rule.title,
        statement=rule.statement,
        family=rule.family,
        level=rule.level.value,
        since=rule.since,
        needs=tuple(need.value for need in rule.needs),
        consequence=rule.consequence,
        outcome=combined({check.outcome for check in checks}),
        checks=tuple(checks),
    )


def _verdict(records: Sequence[RuleRecord], *, strict: bool) -> tuple[Verdict, list[str]]:
    counted = [one for one in records if strict or one.level != Level.PROVISIONAL]
    for verdict, outcomes in (
        (Verdict.FAILED, {Outcome.FAILED}),
        (Verdict.INCONCLUSIVE, {Outcome.ERROR}),
    ):
        reasons = _reasons(counted, outcomes)
        if reasons:
            return verdict, reasons
    ran = {Outcome.PASSED, Outcome.WAIVED, Outcome.UNKNOWN}
    core = [one for one in records if one.level == Level.CORE]
    if not any(
        one.outcome in ran for one in core or records
    ):  # the selection may have no core rule
        kind = "core rule" if core or not records else "rule that was asked for"
        return Verdict.INCONCLUSIVE, [f"no {kind} ran, so nothing is known of this store"]
    reasons = _reasons(counted, {Outcome.WAIVED, Outcome.UNKNOWN})
    if strict:
        reasons += [
            f"{one.id} {one.title}: not verified: {check.message} (--strict)"
            for one in counted
            for check in one.checks
            if check.outcome is Outcome.NOT_VERIFIED
        ]
    return (Verdict.PARTIAL, reasons) if reasons else (Verdict.CONFORMANT, [])


def _untested(records: Sequence[RuleRecord]) -> list[str]:
    """Return the warning that damage at rest was not tested. A good verdict must not hide that."""
    return [
        f"{one.id} WAS NOT TESTED: {one.checks[0].message}. A store that serves a truncated object as a"
        " hit would have passed: see `tamper` in the author's guide"
        for one in records
        if one.id == "KV-403" and one.outcome is Outcome.NOT_VERIFIED and one.checks
    ]


def _reasons(records: Sequence[RuleRecord], outcomes: set[Outcome]) -> list[str]:
    return [
        f"{one.id} {one.title}: {one.outcome.value}" for one in records if one.outcome in outcomes
    ]


def _subject(facts: RunFacts, records: Sequence[RuleRecord]) -> SubjectRecord:
    outcomes = {one.id: one.outcome for one in records}
    words = describe(facts.claims) if facts.claims else {}
    target = facts.storage_class
    return SubjectRecord(
        name=facts.name,
        target=f"{target.__module__}:{target.__qualname__}",
        version=_version_of(target),
        facts=Redactor.of(facts.config).value(facts.store_facts),
        config=Redactor.of(facts.config).value(facts.config),
        capabilities=tuple(_capability(name, word, outcomes) for name, word in words.items()),
    )


def _capability(name: str, word: str, outcomes: Mapping[str, Outcome]) -> CapabilityRecord:
    rules = tuple(rule for rule in _EVIDENCE.get(name, ()) if rule in outcomes)
    seen = {outcomes[rule] for rule in rules}
    if seen & {Outcome.FAILED, Outcome.WAIVED}:
        return CapabilityRecord(name=name, claimed=word, outcome="refuted", rules=rules)
    verified = Outcome.PASSED in seen and seen <= {Outcome.PASSED, Outcome.NOT_DECLARED}
    return CapabilityRecord(
        name=name, claimed=word, outcome="verified" if verified else "not_verified", rules=rules
    )


def _run(facts: RunFacts) -> RunRecord:
    return RunRecord(
        started_at=facts.started_at,
        elapsed_s=round(facts.elapsed_s, 3),
        seed=facts.seed,
        quick=facts.quick,
        strict=facts.strict,
        selection=facts.selection,
        spec=facts.spec,
        kit=metadata.version(DISTRIBUTION),
        command=facts.command,
        python=platform.python_version(),
        platform=f"{sys.platform} {platform.machine()}",
    )


def _version_of(target: type) -> str:
    """Return the version of the distribution that has the class; nothing for a loose file."""
    presented = getattr(target, "distribution", "")
    if presented:
        return f"{presented} {metadata.version(presented)}"
    package = target.__module__.partition(".")[0]
    owners = metadata.packages_distributions().get(package, [])
    return f"{owners[0]} {metadata.version(owners[0])}" if owners else ""
