from __future__ import annotations

import pytest
from hicache_conformance.report.record import Record
from hicache_conformance.report.wording import (
    counted,
    limits,
    meaning,
    remedies,
    reproduction,
    weighed,
)
from hicache_conformance.run.outcomes import Outcome, Verdict
from report_samples import DOORLESS, check_of, conformant, failed, partial, record_of, rule_of

STRICT_GAP = (
    "All 2 rules that could be tested hold, but 1 could not be verified, and strict mode does not"
    " accept that."
)
OPEN = rule_of("KV-403", Outcome.NOT_VERIFIED, DOORLESS)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (
            conformant(),
            "All 3 rules that could be tested hold; 1 more could not be verified.",
        ),
        (record_of(rule_of("KV-001")), "The one rule that could be tested holds."),
        (failed(), "The store breaks 1 of the 3 rules that could be tested."),
        (
            partial(),
            "Not every rule is known to hold: of the 2 rules that could be tested, 1 is waived.",
        ),
        (
            record_of(rule_of("KV-001"), rule_of("KV-002"), OPEN, verdict=Verdict.PARTIAL),
            STRICT_GAP,
        ),
        (
            record_of(verdict=Verdict.INCONCLUSIVE),
            "This run decides nothing about the store: too few checks ran, or the tools failed.",
        ),
    ],
)
def test_a_verdict_has_a_meaning(record: Record, sentence: str) -> None:
    assert sentence == meaning(record)


def test_rules_on_trial_count_in_a_strict_run_only() -> None:
    trial = rule_of("KV-002", Outcome.FAILED, level="provisional")

    assert meaning(record_of(rule_of("KV-001"), trial)).startswith("The one rule")
    strict = record_of(rule_of("KV-001"), trial, strict=True, verdict=Verdict.FAILED)
    assert meaning(strict) == "The store breaks 1 of the 2 rules that could be tested."


def test_a_run_of_some_rules_is_marked_as_partial() -> None:
    record = record_of(rule_of("KV-101"), selection=("KV-1*",), quick=True)

    assert limits(record) == [
        "Only the rules KV-1* were run: the verdict is about these alone.",
        "A quick run: checks that take long were left out.",
    ]


def test_stochastic_checks_are_named() -> None:
    lucky = rule_of("KV-501", Outcome.PASSED, check_of("KV-501", stochastic=True))

    assert limits(record_of(lucky)) == [
        "1 stochastic check: a pass of this one means not caught this time."
    ]


@pytest.mark.parametrize(
    ("command", "again"),
    [
        (
            "hicache-conformance --seed 7 --report out --rules 'KV-1*' --rules=KV-2*",
            "hicache-conformance --seed 7 --rules KV-202",
        ),
        ("pytest -k kv_1 --hicache-report=out tests", "pytest tests -k kv_202"),
        ("", ""),
        ("hicache-conformance 'cut", "hicache-conformance 'cut"),
    ],
)
def test_one_rule_is_reproduced_by_a_narrower_command(command: str, again: str) -> None:
    rule = rule_of("KV-202", Outcome.FAILED)

    assert again == reproduction(record_of(rule, command=command), rule)


def test_a_missing_back_door_is_named_with_its_remedy() -> None:
    [remedy] = remedies(OPEN)

    assert "`tamper(space, page_hash, data)`" in remedy


def test_a_need_of_the_rule_is_the_remedy_where_no_back_door_is_named() -> None:
    check = check_of("KV-304", Outcome.NOT_VERIFIED, message="the config has no address")

    [remedy] = remedies(rule_of("KV-304", Outcome.NOT_VERIFIED, check))

    assert "address of a server" in remedy


def test_a_failure_under_a_waiver_that_holds_is_waived() -> None:
    check = check_of("KV-005", Outcome.FAILED)

    assert weighed(check, rule_of("KV-005", Outcome.WAIVED, check)) is Outcome.WAIVED
    assert weighed(check, rule_of("KV-005", Outcome.FAILED, check)) is Outcome.FAILED


def test_nouns_are_counted() -> None:
    assert [counted(1, "rule"), counted(1200, "rule")] == ["1 rule", "1,200 rules"]
