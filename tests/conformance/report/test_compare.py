from __future__ import annotations

import io

import pytest
from hicache_conformance.report.compare import Change, Direction, compare, print_comparison, tables
from hicache_conformance.report.record import CapabilityRecord, Record
from hicache_conformance.run.outcomes import Outcome, Verdict
from report_samples import WAIVER, check_of, conformant, failed, record_of, rule_of
from rich.console import Console


def claims(*capabilities: CapabilityRecord) -> Record:
    record = record_of(rule_of("KV-001"))
    subject = record.subject.model_copy(update={"capabilities": capabilities})
    return record.model_copy(update={"subject": subject})


def shared(outcome: str, claimed: str = "yes") -> CapabilityRecord:
    return CapabilityRecord.model_validate(
        {"name": "shared", "claimed": claimed, "outcome": outcome}
    )


def test_runs_of_different_checks_are_compared_in_what_both_ran() -> None:
    other = check_of("KV-307", Outcome.FAILED, name="KV-307:another_fact")
    kept = check_of("KV-307")
    whole = record_of(
        rule_of("KV-001"), rule_of("KV-307", Outcome.FAILED, kept, other), verdict=Verdict.FAILED
    )
    part = record_of(
        rule_of("KV-307", Outcome.PARTLY, kept, left_out=("KV-307:another_fact",)),
        verdict=Verdict.INCOMPLETE,
        left_out=2,
    )

    for before, after in ((whole, part), (part, whole)):
        found = compare(before, after)
        assert (None, (), ()) == (found.verdict, found.rules, found.capabilities)
        assert "The checks that ran in both are compared: 1." in found.notes[-1]


def printed(before: Record, after: Record) -> str:
    out = io.StringIO()
    print_comparison(compare(before, after), Console(file=out, width=80))
    return out.getvalue()


@pytest.mark.parametrize(
    ("before", "after", "direction"),
    [
        (Outcome.PASSED, Outcome.FAILED, Direction.WORSE),
        (Outcome.PASSED, Outcome.NOT_VERIFIED, Direction.WORSE),
        (Outcome.PASSED, Outcome.WAIVED, Direction.WORSE),
        (Outcome.WAIVED, Outcome.UNKNOWN, Direction.WORSE),
        (Outcome.FAILED, Outcome.WAIVED, Direction.BETTER),
        (Outcome.NOT_VERIFIED, Outcome.PASSED, Direction.BETTER),
        (Outcome.FAILED, Outcome.ERROR, Direction.CHANGED),
        (Outcome.PASSED, Outcome.NOT_DECLARED, Direction.CHANGED),
        (Outcome.NOT_DECLARED, Outcome.NOT_VERIFIED, Direction.CHANGED),
        (Outcome.NOT_DECLARED, Outcome.FAILED, Direction.WORSE),
        (Outcome.UNKNOWN, Outcome.NOT_DECLARED, Direction.BETTER),
    ],
)
def test_a_rule_has_a_direction(before: Outcome, after: Outcome, direction: Direction) -> None:
    found = compare(record_of(rule_of("KV-005", before)), record_of(rule_of("KV-005", after)))

    [change] = found.rules
    assert (direction, before, after) == (change.direction, change.before, change.after)
    assert found.regressed is (direction is Direction.WORSE)


def test_nothing_changes_between_a_run_and_itself() -> None:
    found = compare(failed(), failed())

    assert (found.verdict, found.rules, found.capabilities, found.notes) == (None, (), (), ())
    assert found.same_seed
    assert found.same_spec
    assert not found.regressed
    assert printed(failed(), failed()) == "Nothing changed.\n"


def test_rules_appear_and_vanish_and_neither_is_a_regression() -> None:
    found = compare(record_of(rule_of("KV-001")), record_of(rule_of("KV-002")))

    assert [(one.name, one.direction) for one in found.rules] == [
        ("KV-001", Direction.VANISHED),
        ("KV-002", Direction.APPEARED),
    ]
    assert not found.regressed


def test_a_waiver_hides_no_new_failure() -> None:
    def waived(second: Outcome) -> Record:
        checks = (
            check_of("KV-005", Outcome.FAILED),
            check_of("KV-005", second, name="KV-005:another_fact"),
        )
        return record_of(rule_of("KV-005", Outcome.WAIVED, *checks, waiver=WAIVER))

    [change] = compare(waived(Outcome.PASSED), waived(Outcome.FAILED)).rules

    assert change.direction is Direction.WORSE
    assert change.checks == ("KV-005:another_fact",)


@pytest.mark.parametrize(
    ("before", "after", "regressed"),
    [
        (Verdict.CONFORMANT, Verdict.PARTIAL, True),
        (Verdict.PARTIAL, Verdict.INCONCLUSIVE, True),
        (Verdict.INCONCLUSIVE, Verdict.FAILED, True),
        (Verdict.FAILED, Verdict.CONFORMANT, False),
    ],
)
def test_a_lower_verdict_is_a_regression(
    before: Verdict, after: Verdict, *, regressed: bool
) -> None:
    found = compare(record_of(verdict=before), record_of(verdict=after))

    assert found.verdict is not None
    assert regressed is found.regressed


def test_a_refuted_capability_is_a_regression() -> None:
    found = compare(claims(shared("verified")), claims(shared("refuted")))

    assert found.capabilities == (
        Change("shared", "", "yes, verified", "yes, refuted", Direction.WORSE),
    )
    assert found.regressed


def test_a_claim_that_is_withdrawn_is_a_change() -> None:
    found = compare(claims(shared("verified")), claims(shared("verified", "no")))

    assert [one.direction for one in found.capabilities] == [Direction.CHANGED]
    assert not found.regressed


def test_a_capability_appears() -> None:
    [change] = compare(claims(), claims(shared("verified"))).capabilities

    assert change.direction is Direction.APPEARED


def test_differences_between_the_conditions_of_two_runs_are_noted() -> None:
    found = compare(record_of(), record_of(seed=8, spec="1.1", quick=True, selection=("KV-1*",)))

    assert not found.same_seed
    assert not found.same_spec
    assert found.notes == (
        "The rules' version differs: 1.0, then 1.1.",
        "The selection of rules differs: all, then KV-1*.",
        "The mode differs: full, then quick.",
        "The seed differs: 7, then 8.",
    )


def test_regressions_come_first() -> None:
    before = record_of(rule_of("KV-001", Outcome.FAILED), rule_of("KV-002"))
    after = record_of(rule_of("KV-001"), rule_of("KV-002", Outcome.FAILED))

    shown = printed(before, after)

    assert shown.index("KV-002") < shown.index("KV-001")
    assert shown.endswith("Something became worse.\n")
    assert len(tables(compare(before, after))) == 1


def test_eighty_columns_are_enough() -> None:
    shown = printed(conformant(), failed())

    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
