"""The kit on stores whose verdict is known."""

from __future__ import annotations

import pytest
from hicache_conformance.checks import all_checks
from hicache_conformance.rules import RULES
from hicache_conformance.run.runner import RunOptions
from hicache_conformance.selftest.mutants import Mutant, all_mutants
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.subjects import must_pass
from hicache_conformance.selftest.selftest import findings, killed, rules_without_mutants, survivors

QUICK = RunOptions(quick=True, call_limit_s=10)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_wrong_store_is_caught() -> None:
    found = list(findings(RunOptions(call_limit_s=10), rights=False))

    assert survivors(found) == []
    assert {control.name for control in all_mutants()} == {one.store for one in found}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_right_store_passes() -> None:
    """The quick checks; `make selftest` runs all of them."""
    found = list(findings(QUICK, wrongs=False))

    assert survivors(found) == []
    assert {subject.storage_class.__name__ for subject in must_pass()} <= {
        one.store for one in found
    }


def test_every_rule_has_a_wrong_store_and_a_check() -> None:
    assert rules_without_mutants() == []
    assert set(RULES) == {check.rule.id for check in all_checks()}


def test_a_check_that_is_there_for_a_wrong_store_is_one_of_its_rules() -> None:
    known = {(check.rule.id, check.run.__name__) for check in all_checks()}

    for control in all_mutants():
        assert not control.check or known & {(one, control.check) for one in control.rule_ids}


def test_a_check_that_is_there_for_a_wrong_store_is_tried_first() -> None:
    control = next(one for one in all_mutants() if one.name == "SpacesSetHere")
    others = [check.run.__name__ for check in all_checks() if check.rule.id == "KV-104"]

    assert "another_handle_lists_the_same" == control.check != others[0]
    assert control.check == killed(control, "KV-104", RunOptions()).by


def test_a_wrong_store_that_survives_is_told() -> None:
    right = Mutant(DictStore, ("KV-007",), None)

    finding = killed(right, "KV-007", QUICK)

    assert not finding.as_it_should
    assert "survives" in finding.message
    assert [finding] == survivors([finding])


def test_a_wrong_store_says_in_a_sentence_what_is_wrong() -> None:
    assert all(control.fault.endswith((".", ")")) for control in all_mutants())


def test_a_check_states_its_fact_in_a_sentence() -> None:
    assert all(check.title.endswith(".") for check in all_checks())
