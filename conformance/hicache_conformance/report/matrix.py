"""Several stores side by side: a rule a row, a store a column, as a table of Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.report.wording import printable
from hicache_conformance.run.outcomes import Outcome

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Sequence

    from hicache_conformance.report.record import CheckRecord, Record, RuleRecord

_WORDS = {
    Outcome.PASSED: "kept",
    Outcome.FAILED: "**broken**",
    Outcome.WAIVED: "waived",
    Outcome.UNKNOWN: "undecided",
    Outcome.ERROR: "error",
    Outcome.NOT_VERIFIED: "not asked",
    Outcome.NOT_DECLARED: "-",
}
_TRIED = (Outcome.PASSED, Outcome.FAILED)


def matrix(records: Sequence[Record]) -> str:
    """The verdicts of the runs, what each judged, and what came of each rule.

    A cell tells, beside the word, how many of the checks that could be asked found the rule kept, where
    not all of them did.
    """
    rows = [
        ["", "rule", *(_cell(record.subject.name) for record in records)],
        ["---"] * (2 + len(records)),
        ["", "version", *(_cell(record.subject.version) for record in records)],
        ["", "verdict", *(record.verdict.value for record in records)],
        ["", "rules", *(_counted(record.counts()) for record in records)],
        *(_row(rule_id, records) for rule_id in _rules(records)),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(rule_id: str, records: Sequence[Record]) -> list[str]:
    found = [_rule(record, rule_id) for record in records]
    title = next(rule.title for rule in found if rule)
    return [rule_id, _cell(title), *(_outcome(rule) for rule in found)]


def _outcome(rule: RuleRecord | None) -> str:
    if rule is None:
        return ""
    word = _WORDS[rule.outcome]
    tried = _tried(rule.checks)
    kept = sum(check.outcome is Outcome.PASSED for check in tried)
    return word if kept == len(tried) else f"{word} {kept}/{len(tried)}"


def _tried(checks: Iterable[CheckRecord]) -> list[CheckRecord]:
    return [check for check in checks if check.outcome in _TRIED]


def _counted(counts: Counter[Outcome]) -> str:
    return ", ".join(
        f"{counts[one]} {word.strip('*')}"
        for one, word in _WORDS.items()
        if counts[one] and one is not Outcome.NOT_DECLARED
    )


def _rule(record: Record, rule_id: str) -> RuleRecord | None:
    return next((rule for rule in record.rules if rule.id == rule_id), None)


def _rules(records: Sequence[Record]) -> list[str]:
    return sorted({rule.id for record in records for rule in record.rules})


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|")
