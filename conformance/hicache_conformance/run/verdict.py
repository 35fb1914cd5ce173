"""Derives the verdict on a store from the outcomes of its checks."""

from __future__ import annotations

import platform
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from hicache_conformance.checks import all_checks
from hicache_conformance.report.record import (
    CapabilityRecord,
    CheckRecord,
    Record,
    RuleRecord,
    RunRecord,
    SubjectRecord,
)
from hicache_conformance.report.redact import Redactor
from hicache_conformance.rules import SPEC, Level, Rule, selected
from hicache_conformance.run.outcomes import Outcome, Verdict, combined
from hicache_conformance.run.waivers import Waiver, apply_waiver
from hicache_storage.registry import ENTRY_POINT_GROUP
from hicache_storage.storage import Durability, describe

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from hicache_storage.storage import Capabilities, HiCacheStorage

DISTRIBUTION = "hicache-storage"

_GOOD = (Verdict.CONFORMANT, Verdict.INCOMPLETE, Verdict.PARTIAL)

_EVIDENCE = {
    "retention": ("KV-002", "KV-901"),
    "durability": ("KV-401", "KV-402", "KV-405"),
    "shared": ("KV-502",),
    "enumerable": ("KV-103", "KV-104"),
    "overwrites": ("KV-005",),
    "scatter_gather": ("KV-008",),
    "alignment": ("KV-008",),
    "parallelism": ("KV-504",),
    "max_batch": ("KV-204", "KV-903"),
    "max_page_nbytes": ("KV-008", "KV-903"),
    "max_batch_nbytes": ("KV-204", "KV-903"),
    "bounded": ("KV-304", "KV-901"),
    "revocable": ("KV-901",),
    "keeps_given": ("KV-205",),
}
"""The rules that show whether a claim is true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a verdict needs besides the outcomes of the checks."""

    name: str
    storage_class: type[HiCacheStorage]
    claims: Capabilities | None
    """None if no storage could be opened."""
    absent: Mapping[str, str] = field(default_factory=dict[str, str])
    """The operations that the store was not written for: `Subject.absent`."""
    store_facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the store says about itself, by topic."""
    problem: str = ""
    """Why no storage could be opened."""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    started_at: dt.datetime
    elapsed_s: float
    seed: int = 0
    quick: bool = False
    strict: bool = False
    selection: tuple[str, ...] = ()
    spec: str = SPEC
    command: str = ""
    expected: Collection[str] | None = None
    """The names of the checks of a whole run. None: all checks of the rules of `spec`."""


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
    left_out = _left_out(facts, [check.name for found in by_rule.values() for check in found])
    records = tuple(
        apply_waiver(_rule_record(r, by_rule[r.id], left_out.get(r.id, ())), waivers) for r in rules
    )
    verdict, reasons = _verdict(records, strict=facts.strict, is_whole=not left_out)
    if verdict in _GOOD and not facts.strict:
        reasons += _untested(records)
    if facts.absent and verdict in _GOOD:
        verdict = Verdict.PARTIAL
        reasons += [f"{name}: {words}" for name, words in facts.absent.items()]
    if facts.problem:
        verdict, reasons = Verdict.INCONCLUSIVE, [facts.problem]
    record = Record(
        subject=_subject(facts, records),
        run=_run(facts, sum(map(len, by_rule.values())), sum(map(len, left_out.values()))),
        verdict=verdict,
        reasons=tuple(reasons),
        rules=records,
    )
    return Redactor.of(facts.config).record(record)


def _left_out(facts: RunFacts, ran: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the checks of a whole run that did not run, by rule."""
    expected = facts.expected
    if expected is None:
        rules = selected((), facts.spec)
        expected = [check.name for check in all_checks() if check.rule in rules]
    found: defaultdict[str, tuple[str, ...]] = defaultdict(tuple)
    for name in expected:
        if name not in ran:
            found[name.partition(":")[0]] += (name,)
    return dict(found)


def _rule_record(
    rule: Rule, checks: Sequence[CheckRecord], left_out: tuple[str, ...]
) -> RuleRecord:
    return RuleRecord(
        id=rule.id,
        title=rule.title,
        statement=rule.statement,
        family=rule.family,
        level=rule.level.value,
        since=rule.since,
        needs=tuple(need.value for need in rule.needs),
        consequence=rule.consequence,
        outcome=combined({check.outcome for check in checks}, is_whole=not left_out),
        checks=tuple(checks),
        left_out=left_out,
    )


def _verdict(
    records: Sequence[RuleRecord], *, strict: bool, is_whole: bool
) -> tuple[Verdict, list[str]]:
    counted = [one for one in records if strict or one.level != Level.PROVISIONAL]
    for verdict, outcomes in (
        (Verdict.FAILED, {Outcome.FAILED}),
        (Verdict.INCONCLUSIVE, {Outcome.ERROR}),
    ):
        reasons = _reasons(counted, outcomes)
        if reasons:
            return verdict, reasons
    ran = {Outcome.PASSED, Outcome.PARTLY, Outcome.WAIVED, Outcome.UNKNOWN}
    core = [one for one in records if one.level == Level.CORE]
    if not any(
        one.outcome in ran for one in core or records
    ):  # the selection may have no core rule
        kind = "core rule" if core or not records else "selected rule"
        return Verdict.INCONCLUSIVE, [f"no {kind} ran, so nothing is known of this store"]
    reasons = _reasons(counted, {Outcome.WAIVED, Outcome.UNKNOWN})
    if strict:
        reasons += [
            f"{one.id} {one.title}: not verified: {check.message} (--strict)"
            for one in counted
            for check in one.checks
            if check.outcome is Outcome.NOT_VERIFIED
        ]
    if reasons:
        return Verdict.PARTIAL, reasons
    return (Verdict.CONFORMANT if is_whole else Verdict.INCOMPLETE), []


_HINTS = {
    "KV-403": ". A store that serves a truncated object as a hit would have passed: see `tamper` in the"
    " author's guide"
}
"""Text after the warning that a rule was not tested."""


def _untested(records: Sequence[RuleRecord]) -> Iterator[str]:
    """Yield a warning for each rule that was not tested in full, even with a good verdict."""
    for one in records:
        why = [check.message for check in one.checks if check.outcome is Outcome.NOT_VERIFIED]
        if not why:
            continue
        words = "WAS NOT TESTED"
        if one.outcome is not Outcome.NOT_VERIFIED:
            words = f"WAS TESTED IN PART: {len(why)} of {len(one.checks)} checks could not run"
        yield f"{one.id} {words}: {'; '.join(dict.fromkeys(why))}{_HINTS.get(one.id, '')}"


def _reasons(records: Sequence[RuleRecord], outcomes: set[Outcome]) -> list[str]:
    return [
        f"{one.id} {one.title}: {one.outcome.value}" for one in records if one.outcome in outcomes
    ]


def _subject(facts: RunFacts, records: Sequence[RuleRecord]) -> SubjectRecord:
    outcomes = {one.id: one.outcome for one in records}
    claims = facts.claims
    words = describe(claims) if claims else {}
    is_power = claims is not None and claims.durability is Durability.POWER
    target = facts.storage_class
    return SubjectRecord(
        name=facts.name,
        target=f"{target.__module__}:{target.__qualname__}",
        version=_version_of(target),
        facts=Redactor.of(facts.config).value(facts.store_facts),
        config=Redactor.of(facts.config).value(facts.config),
        capabilities=tuple(
            _capability(name, word, outcomes, is_power=is_power and name == "durability")
            for name, word in words.items()
        ),
    )


_NO_POWER_CUT = "crash verified, power not testable here"
"""Shown if a store claims to survive a power loss, but no back door `cut_power` shows it."""
_POWER_RULE = "KV-405"
_VERIFIED = {Outcome.PASSED, Outcome.NOT_DECLARED}


def _capability(
    name: str, word: str, outcomes: Mapping[str, Outcome], *, is_power: bool
) -> CapabilityRecord:
    rules = tuple(rule for rule in _EVIDENCE.get(name, ()) if rule in outcomes)
    if is_power and outcomes.get(_POWER_RULE) is Outcome.PASSED:
        is_power = False
    elif outcomes.get(_POWER_RULE) in (Outcome.NOT_VERIFIED, Outcome.NOT_DECLARED):
        rules = tuple(rule for rule in rules if rule != _POWER_RULE)
    seen = {outcomes[rule] for rule in rules}
    if seen & {Outcome.FAILED, Outcome.WAIVED}:
        return CapabilityRecord(name=name, claimed=word, outcome="refuted", rules=rules)
    outcome: Literal["verified", "partly", "not_verified"] = "not_verified"
    if seen & {Outcome.PASSED, Outcome.PARTLY} and seen <= {*_VERIFIED, Outcome.PARTLY}:
        outcome = "partly" if is_power or Outcome.PARTLY in seen else "verified"
    note = _NO_POWER_CUT if is_power and seen <= _VERIFIED and outcome == "partly" else ""
    return CapabilityRecord(name=name, claimed=word, outcome=outcome, note=note, rules=rules)


def _run(facts: RunFacts, ran: int, left_out: int) -> RunRecord:
    return RunRecord(
        started_at=facts.started_at,
        elapsed_s=round(facts.elapsed_s, 3),
        seed=facts.seed,
        quick=facts.quick,
        strict=facts.strict,
        selection=facts.selection,
        ran=ran,
        left_out=left_out,
        spec=facts.spec,
        kit=metadata.version(DISTRIBUTION),
        command=facts.command,
        python=platform.python_version(),
        platform=f"{sys.platform} {platform.machine()}",
    )


def _version_of(target: type) -> str:
    """Return the version of the class's distribution, or the `__version__` of its package."""
    presented = getattr(target, "distribution", "")
    if presented:
        return f"{presented} {metadata.version(presented)}"
    package = target.__module__.partition(".")[0]
    owners = metadata.packages_distributions().get(package) or [
        entry.dist.name  # of an editable installation, whose metadata names no packages
        for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)
        if entry.dist is not None and entry.module.partition(".")[0] == package
    ]
    if owners:
        return f"{owners[0]} {metadata.version(owners[0])}"
    version = getattr(sys.modules.get(package), "__version__", "")
    return f"{package} {version}" if version else ""
