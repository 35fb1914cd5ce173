from __future__ import annotations

import pytest
from hicache_conformance.rules import RULES, Level
from hicache_conformance.run.outcomes import Outcome, Verdict, combined
from records import check_record, record

from hicache_storage.storage import Capabilities, Durability

PASSED = check_record("KV-001", Outcome.PASSED)


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (Outcome.PASSED, Verdict.CONFORMANT),
        (Outcome.NOT_DECLARED, Verdict.CONFORMANT),
        (Outcome.NOT_VERIFIED, Verdict.CONFORMANT),
        (Outcome.UNKNOWN, Verdict.PARTIAL),
        (Outcome.FAILED, Verdict.FAILED),
        (Outcome.ERROR, Verdict.INCONCLUSIVE),
    ],
)
def test_the_verdict_follows_from_the_worst_outcome(outcome: Outcome, verdict: Verdict) -> None:
    assert verdict == record(PASSED, check_record("KV-401", outcome)).verdict


def test_a_failure_outweighs_an_error() -> None:
    given = record(check_record("KV-002", Outcome.ERROR), check_record("KV-003", Outcome.FAILED))

    assert given.verdict == Verdict.FAILED


@pytest.mark.parametrize("outcome", [Outcome.NOT_DECLARED, Outcome.NOT_VERIFIED])
def test_a_run_without_a_core_rule_is_inconclusive(outcome: Outcome) -> None:
    given = record(check_record("KV-001", outcome), check_record("KV-401", Outcome.PASSED))

    assert given.verdict == Verdict.INCONCLUSIVE
    assert "no core rule ran" in given.reasons[0]


def test_nothing_run_is_inconclusive() -> None:
    assert record().verdict == Verdict.INCONCLUSIVE


def test_a_store_that_could_not_be_opened_is_inconclusive_for_that_reason() -> None:
    given = record(PASSED, problem="connection refused", claims=None)

    assert (Verdict.INCONCLUSIVE, ("connection refused",)) == (given.verdict, given.reasons)
    assert not given.subject.capabilities


def test_strict_makes_a_rule_that_was_not_verified_partial() -> None:
    checks = (PASSED, check_record("KV-403", Outcome.NOT_VERIFIED, message="needs tamper"))

    assert record(*checks).verdict == Verdict.CONFORMANT
    strict = record(*checks, strict=True)
    assert strict.verdict == Verdict.PARTIAL
    assert "needs tamper" in strict.reasons[0]


def test_strict_counts_a_check_that_was_not_verified_in_a_rule_that_passed() -> None:
    checks = (PASSED, check_record("KV-001", Outcome.NOT_VERIFIED, "another_fact"))

    assert record(*checks, strict=True).verdict == Verdict.PARTIAL


def test_a_provisional_rule_counts_with_strict_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RULES["KV-504"]
    provisional = type(rule)(rule.id, rule.title, rule.statement, "", Level.PROVISIONAL)
    monkeypatch.setitem(RULES, rule.id, provisional)
    checks = (PASSED, check_record(rule.id, Outcome.FAILED))

    assert record(*checks).verdict == Verdict.CONFORMANT
    assert record(*checks, strict=True).verdict == Verdict.FAILED


@pytest.mark.parametrize("outcome", Outcome)
def test_a_rule_has_the_weightiest_outcome_of_its_checks(outcome: Outcome) -> None:
    lighter = set(list(Outcome)[list(Outcome).index(outcome) :])
    lighter -= {Outcome.NOT_VERIFIED} if outcome is Outcome.PASSED else set()

    assert outcome == combined(lighter)


def test_a_rule_with_a_check_that_could_not_run_is_kept_in_part() -> None:
    given = record(
        PASSED,
        check_record("KV-001", Outcome.NOT_VERIFIED, "another_fact", message="needs `tamper`"),
    )

    assert Outcome.PARTLY == given.rules[0].outcome
    assert Verdict.CONFORMANT == given.verdict
    assert "KV-001 WAS TESTED IN PART: 1 of 2 checks could not run: needs `tamper`" in given.reasons


def test_a_rule_with_a_check_that_does_not_apply_is_passed() -> None:
    checks = (PASSED, check_record("KV-001", Outcome.NOT_DECLARED, "another_fact"))

    assert Outcome.PASSED == record(*checks).rules[0].outcome


def test_a_run_that_left_out_a_check_is_not_conformant() -> None:
    given = record(PASSED, expected=[PASSED.name, "KV-001:another_fact", "KV-002:a_fact"])

    assert (Verdict.INCOMPLETE, Outcome.PARTLY) == (given.verdict, given.rules[0].outcome)
    assert (1, 2) == (given.run.ran, given.run.left_out)
    assert ("KV-001:another_fact",) == given.rules[0].left_out


@pytest.mark.parametrize(
    ("power_cut", "shown", "note"),
    [
        (Outcome.NOT_VERIFIED, "partly", "crash verified, power not testable here"),
        (Outcome.PASSED, "verified", ""),
        (Outcome.FAILED, "refuted", ""),
    ],
)
def test_a_claim_about_the_loss_of_power_needs_a_power_cut(
    power_cut: Outcome, shown: str, note: str
) -> None:
    kept = (check_record("KV-401", Outcome.PASSED), check_record("KV-402", Outcome.PASSED))
    cut = check_record("KV-405", power_cut)

    given = record(PASSED, *kept, cut, claims=Capabilities(durability=Durability.POWER))

    [claim] = [one for one in given.subject.capabilities if one.name == "durability"]
    assert (shown, note) == (claim.outcome, claim.note)


def test_a_rule_without_checks_is_not_verified() -> None:
    assert combined([]) is Outcome.NOT_VERIFIED


@pytest.mark.parametrize(
    ("outcome", "shown"),
    [
        (Outcome.PASSED, "verified"),
        (Outcome.FAILED, "refuted"),
        (Outcome.NOT_VERIFIED, "not_verified"),
    ],
)
def test_a_claim_is_as_true_as_the_rules_about_it(outcome: Outcome, shown: str) -> None:
    given = record(
        PASSED,
        check_record("KV-401", Outcome.PASSED),
        check_record("KV-402", outcome),
        claims=Capabilities(durability=Durability.CRASH),
    )

    claims = {claim.name: claim for claim in given.subject.capabilities}
    assert (shown, "crash") == (claims["durability"].outcome, claims["durability"].claimed)


def test_no_secret_of_the_config_is_in_the_record() -> None:
    given = record(
        PASSED,
        check_record("KV-303", Outcome.FAILED, message="login with hunter22 failed"),
        config={"url": "redis://me:hunter22@localhost:1/0", "password": "swordfish1"},
        command="hicache-conformance --config swordfish1",
    )

    text = given.to_json()
    assert "hunter22" not in text
    assert "swordfish1" not in text
    assert "localhost" in text


def test_exit_codes_are_those_of_the_documentation() -> None:
    codes = {verdict.value: verdict.exit_code for verdict in Verdict}

    assert {"conformant": 0, "incomplete": 0, "failed": 1, "partial": 2, "inconclusive": 3} == codes


def test_selected_rules_give_a_verdict_though_none_is_core() -> None:
    assert Verdict.CONFORMANT == record(check_record("KV-307", Outcome.PASSED)).verdict


def test_a_good_verdict_mentions_that_damage_at_rest_was_not_tested() -> None:
    checks = (PASSED, check_record("KV-403", Outcome.NOT_VERIFIED, message="needs tamper"))

    given = record(*checks)
    (reason,) = given.reasons
    assert given.verdict == Verdict.CONFORMANT
    assert "KV-403 WAS NOT TESTED: needs tamper" in reason
