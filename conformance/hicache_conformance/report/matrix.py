"""Several stores side by side in a Markdown table: one row per rule, one column per store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.report.wording import verdict_words
from hicache_conformance.run.outcomes import Outcome
from hicache_storage.markup import printable

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from hicache_conformance.report.summary import RuleSummary, Summary

_WORDS = {
    Outcome.PASSED: "kept",
    Outcome.PARTLY: "kept in part",
    Outcome.FAILED: "**broken**",
    Outcome.WAIVED: "waived",
    Outcome.UNKNOWN: "undecided",
    Outcome.ERROR: "error",
    Outcome.NOT_VERIFIED: "not asked",
    Outcome.NOT_DECLARED: "-",
}


def matrix(records: Sequence[Summary]) -> str:
    """Return a table with the version, the verdict and the outcome of each rule for several runs.

    If some checks of a rule did not pass, the cell also has the number of checks that passed.
    """
    rows = [
        ["", "rule", *(_cell(record.store.name) for record in records)],
        ["---"] * (2 + len(records)),
        ["", "version", *(_cell(record.store.version) for record in records)],
        ["", "verdict", *(verdict_words(record.verdict, record.counts()) for record in records)],
        ["", "rules", *(_counted(record.counts()) for record in records)],
        *(_row(rule_id, records) for rule_id in _rules(records)),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(rule_id: str, records: Sequence[Summary]) -> list[str]:
    found = [_rule(record, rule_id) for record in records]
    title = next(rule.title for rule in found if rule)
    return [rule_id, _cell(title), *(_outcome(rule) for rule in found)]


def _outcome(rule: RuleSummary | None) -> str:
    if rule is None:
        return ""
    word = _WORDS[rule.outcome]
    kept = rule.checks.get(Outcome.PASSED, 0)
    asked = kept + rule.checks.get(Outcome.FAILED, 0)
    return word if kept == asked else f"{word} {kept}/{asked}"


def _counted(counts: Counter[Outcome]) -> str:
    return ", ".join(
        f"{counts[one]} {word.strip('*')}"
        for one, word in _WORDS.items()
        if counts[one] and one is not Outcome.NOT_DECLARED
    )


def _rule(record: Summary, rule_id: str) -> RuleSummary | None:
    return next((rule for rule in record.rules if rule.id == rule_id), None)


def _rules(records: Sequence[Summary]) -> list[str]:
    return sorted({rule.id for record in records for rule in record.rules})


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|")
