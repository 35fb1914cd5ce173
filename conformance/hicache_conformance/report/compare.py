"""What changed between two runs, and what became worse."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from hicache_conformance.report.terminal import show
from hicache_conformance.report.wording import label, verdict_words
from hicache_conformance.run.outcomes import Outcome, Verdict, combined
from hicache_storage.markup import printable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rich.console import Console

    from hicache_conformance.report.record import CapabilityRecord, Record, RuleRecord


class Direction(enum.StrEnum):
    """Whether a change is better or worse for the users of the store."""

    WORSE = "worse"
    BETTER = "better"
    CHANGED = "changed"
    """Neither better nor worse: a claim was made or withdrawn, or a rule is open for another reason."""
    APPEARED = "appeared"
    VANISHED = "vanished"


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one rule, one capability, or the verdict."""

    name: str
    title: str
    before: str
    """The old state; empty if there was none."""
    after: str
    """The new state; empty if there is none."""
    direction: Direction
    checks: tuple[str, ...] = ()
    """The checks of a rule that changed in the same direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of an older run with a newer one."""

    verdict: Change | None
    rules: tuple[Change, ...]
    capabilities: tuple[Change, ...]
    same_seed: bool
    same_spec: bool
    notes: tuple[str, ...]
    """Why the two runs can't be compared one to one, in a sentence each."""

    @property
    def regressed(self) -> bool:
        """True if anything became worse."""
        changes = (*((self.verdict,) if self.verdict else ()), *self.rules, *self.capabilities)
        return any(change.direction is Direction.WORSE for change in changes)


_GRADES = {
    Outcome.FAILED: 0,
    Outcome.ERROR: 0,
    Outcome.UNKNOWN: 1,
    Outcome.WAIVED: 2,
    Outcome.NOT_VERIFIED: 3,
    Outcome.PARTLY: 4,
    Outcome.PASSED: 5,
}
_BELOW_KEPT = (Outcome.FAILED, Outcome.ERROR, Outcome.UNKNOWN, Outcome.WAIVED)
_VERDICTS = (
    Verdict.FAILED,
    Verdict.INCONCLUSIVE,
    Verdict.PARTIAL,
    Verdict.INCOMPLETE,
    Verdict.CONFORMANT,
)
_CAPABILITIES = ("refuted", "not_verified", "partly", "verified")


def compare(a: Record, b: Record) -> Comparison:
    """Return the changes from run `a` to run `b`.

    If one of them ran only some checks, only the checks that both ran are compared.
    """
    notes = _notes(a, b)
    ran = [{check.name for rule in one.rules for check in rule.checks} for one in (a, b)]
    is_narrowed = ran[0] != ran[1] and not (a.is_whole and b.is_whole)
    if is_narrowed:
        only = [len(ran[0] - ran[1]), len(ran[1] - ran[0])]
        notes.append(
            f"The checks that ran in both are compared: {len(ran[0] & ran[1])}. {only[0]} ran before"
            f" only, {only[1]} after only. The verdicts are not compared, because they are about"
            " different checks."
        )
        differ = {name.partition(":")[0] for name in ran[0] ^ ran[1]}
        a, b = (_narrowed(one, ran[0] & ran[1], differ) for one in (a, b))
    step = _VERDICTS.index(b.verdict) - _VERDICTS.index(a.verdict)
    words = [verdict_words(one.verdict, one.counts()) for one in (a, b)]
    verdict = Change("verdict", "", words[0], words[1], _direction(step))
    return Comparison(
        verdict=verdict if words[0] != words[1] and not is_narrowed else None,
        rules=tuple(_rule_changes(a, b)),
        capabilities=tuple(_capability_changes(a, b)),
        same_seed=a.run.seed == b.run.seed,
        same_spec=a.run.spec == b.run.spec,
        notes=tuple(notes),
    )


def _narrowed(record: Record, checks: Collection[str], differ: Collection[str]) -> Record:
    """Return the record as if only `checks` had run. For the rules in `differ`, other checks ran too."""
    rules = [
        _narrowed_rule(rule, checks)
        for rule in record.rules
        if any(check.name in checks for check in rule.checks)
    ]
    subject = record.subject
    claims = [_unjudged(one, differ) for one in subject.capabilities]
    return record.model_copy(
        update={
            "rules": tuple(rules),
            "subject": subject.model_copy(update={"capabilities": tuple(claims)}),
        }
    )


def _narrowed_rule(rule: RuleRecord, checks: Collection[str]) -> RuleRecord:
    kept = tuple(check for check in rule.checks if check.name in checks)
    outcome = combined({check.outcome for check in kept})
    if rule.outcome is Outcome.WAIVED and outcome is Outcome.FAILED:
        outcome = Outcome.WAIVED
    return rule.model_copy(update={"checks": kept, "outcome": outcome})


def _unjudged(claim: CapabilityRecord, differ: Collection[str]) -> CapabilityRecord:
    """Return the claim without its outcome, unless all checks of its rules are compared."""
    if not set(claim.rules) & set(differ):
        return claim
    return claim.model_copy(update={"outcome": "not_verified", "note": ""})


def _direction(step: int) -> Direction:
    if step == 0:
        return Direction.CHANGED
    return Direction.BETTER if step > 0 else Direction.WORSE


def _step(before: Outcome, after: Outcome) -> int:
    """Return how much an outcome improved. 0 means that it is only different."""
    if Outcome.NOT_DECLARED not in (before, after):
        return _GRADES[after] - _GRADES[before]
    return (before in _BELOW_KEPT) - (after in _BELOW_KEPT)


def _rule_changes(a: Record, b: Record) -> list[Change]:
    older, newer = ({rule.id: rule for rule in one.rules} for one in (a, b))
    changes: list[Change] = []
    for name in sorted({*older, *newer}):
        before, after = older.get(name), newer.get(name)
        if before is not None and after is not None:
            changes += _rule_change(before, after)
        elif after is not None:
            changes.append(Change(name, after.title, "", after.outcome.value, Direction.APPEARED))
        elif before is not None:
            changes.append(Change(name, before.title, before.outcome.value, "", Direction.VANISHED))
    return changes


def _rule_change(before: RuleRecord, after: RuleRecord) -> list[Change]:
    """Yield at most one change. If the outcome is the same, the checks decide."""
    outcomes = {check.name: check.outcome for check in before.checks}
    steps = {
        check.name: _step(outcomes[check.name], check.outcome)
        for check in after.checks
        if check.name in outcomes
    }
    worse = tuple(name for name, step in steps.items() if step < 0)
    better = tuple(name for name, step in steps.items() if step > 0)
    step = _step(before.outcome, after.outcome)
    if before.outcome is after.outcome:
        if not worse and not better:
            return []
        step = -1 if worse else 1
    checks = {Direction.WORSE: worse, Direction.BETTER: better}.get(_direction(step), ())
    outcome = (before.outcome.value, after.outcome.value)
    return [Change(after.id, after.title, *outcome, _direction(step), checks)]


def _capability_changes(a: Record, b: Record) -> list[Change]:
    older, newer = ({one.name: one for one in r.subject.capabilities} for r in (a, b))
    changes: list[Change] = []
    for name in dict.fromkeys([*older, *newer]):
        before, after = older.get(name), newer.get(name)
        words = [
            f"{one.claimed}, {one.note or label(one.outcome)}" if one else ""
            for one in (before, after)
        ]
        if words[0] == words[1]:
            continue
        if before is None or after is None:
            direction = Direction.APPEARED if before is None else Direction.VANISHED
        else:
            grades = [_CAPABILITIES.index(one.outcome) for one in (before, after)]
            direction = _direction(grades[1] - grades[0])
        changes.append(Change(name, "", words[0], words[1], direction))
    return changes


def _notes(a: Record, b: Record) -> list[str]:
    facts: Mapping[str, tuple[object, object]] = {
        "store": (a.subject.target, b.subject.target),
        "rules' version": (a.run.spec, b.run.spec),
        "selection of rules": (_selection(a), _selection(b)),
        "mode": (_mode(a), _mode(b)),
        "seed": (a.run.seed, b.run.seed),
        "kit": (a.run.kit, b.run.kit),
    }
    return [
        f"The {name} differs: {before}, then {after}."
        for name, (before, after) in facts.items()
        if before != after
    ]


def _selection(record: Record) -> str:
    return ", ".join(record.run.selection) or "all"


def _mode(record: Record) -> str:
    words = ["quick"] * record.run.quick + ["strict"] * record.run.strict
    return " and ".join(words) or "full"


_STYLES = {Direction.WORSE: "red", Direction.BETTER: "green"}


def tables(comparison: Comparison) -> list[Table]:
    """Return tables of the changes, with changes for the worse first."""
    order = list(Direction)
    rules = sorted(comparison.rules, key=lambda one: order.index(one.direction))
    verdict = [comparison.verdict] if comparison.verdict else []
    parts = {"verdict": verdict, "rule": rules, "capability": comparison.capabilities}
    return [_table(title, changes) for title, changes in parts.items() if changes]


def _table(title: str, changes: Sequence[Change]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    table.add_column(title, overflow="fold")
    table.add_column("before", overflow="fold")
    table.add_column("after", overflow="fold")
    for change in changes:
        name = "\n".join([f"{change.name} {change.title}".strip(), *_check_lines(change)])
        table.add_row(
            Text(change.direction.value, style=_STYLES.get(change.direction, "")),
            Text(printable(name)),
            Text(printable(label(change.before)) or "-"),
            Text(printable(label(change.after)) or "-"),
        )
    return table


def _check_lines(change: Change) -> list[str]:
    return [f"  {name.partition(':')[2] or name}" for name in change.checks]


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print the changes, or say that there are none."""
    found = tables(comparison)
    end = "Something became worse." if comparison.regressed else "Nothing became worse."
    notes = [Text(printable(note)) for note in comparison.notes]
    parts = [part for table in found for part in (table, Text(""))]
    show(console, *notes, *parts, Text(end if found else "Nothing changed."))
