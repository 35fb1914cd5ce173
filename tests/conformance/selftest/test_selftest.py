"""The kit on stores whose verdict is known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hicache_conformance.checks import Check, all_checks
from hicache_conformance.rules import RULES
from hicache_conformance.run.runner import RunOptions
from hicache_conformance.selftest.mutants import Mutant, all_mutants, mutant_named
from hicache_conformance.selftest.references.compositions import TieredSubject
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.subjects import (
    EvictingShelfSubject,
    RentedSubject,
    SlowSubject,
    SqliteSubject,
    WireSubject,
    must_pass,
)
from hicache_conformance.selftest.selftest import (
    CALL_LIMIT_S,
    Finding,
    checks_without_mutants,
    findings,
    killed,
    survivors,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.run.subject import Subject

QUICK = RunOptions(quick=True, call_limit_s=CALL_LIMIT_S)
FIRST = (
    EvictingShelfSubject,
    RentedSubject,
    SlowSubject,
    SqliteSubject,
    TieredSubject,
    WireSubject,
)
"""One store of each kind: files, lent memory, few promises, a database, a composition, a server."""


def check_named(name: str) -> Check:
    return next(one for one in all_checks() if one.name == name)


def must_be_as_expected(found: Sequence[Finding]) -> None:
    """Name stores and checks in the first line, which a log that is cut short still shows."""
    wrong = "; ".join(f"{one.store} {one.check} {one.message}" for one in survivors(found))
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_wrong_store_is_caught_by_each_of_its_checks() -> None:
    found = list(findings(RunOptions(call_limit_s=CALL_LIMIT_S), rights=()))

    must_be_as_expected(found)
    assert {(mutant.name, check) for mutant in all_mutants() for check in mutant.checks} == {
        (one.store, one.check) for one in found
    }


@pytest.mark.parametrize(
    "rights",
    [
        pytest.param(FIRST, marks=pytest.mark.slow),
        pytest.param(tuple(set(must_pass()) - set(FIRST)), marks=pytest.mark.long),
    ],
    ids=["kinds", "rest"],
)
@pytest.mark.timeout(600)
def test_a_right_store_passes(rights: Sequence[type[Subject]]) -> None:
    """The test has the quick checks; `make selftest` runs all of them."""
    found = list(findings(QUICK, wrongs=False, rights=rights))

    must_be_as_expected(found)
    assert {subject.storage_class.__name__ for subject in rights} <= {one.store for one in found}


def test_every_rule_has_a_check_and_every_check_a_wrong_store() -> None:
    assert set(RULES) == {check.rule.id for check in all_checks()}
    assert checks_without_mutants() == []


def test_the_checks_of_a_wrong_store_exist() -> None:
    known = {check.name for check in all_checks()}

    assert {check for mutant in all_mutants() for check in mutant.checks} <= known
    assert all(mutant.checks for mutant in all_mutants())


def test_a_wrong_store_that_survives_is_a_finding() -> None:
    check = check_named("KV-007:deleting_an_absent_page_is_true")

    finding = killed(Mutant(DictStore, (check.name,)), check, QUICK)

    assert not finding.as_expected
    assert "survives: passed" in finding.message
    assert [finding] == survivors([finding])


def test_a_kill_in_other_words_than_the_mutant_names_is_a_finding() -> None:
    check = check_named("KV-202:a_missing_page_changes_no_other")
    mutant = replace(mutant_named("MovesUpAfterAMiss"), says="no such words")

    finding = killed(mutant, check, QUICK)

    assert not finding.as_expected
    assert "killed in other words: failed" in finding.message


def test_a_wrong_store_states_its_fault_in_a_sentence() -> None:
    assert all(mutant.fault.endswith((".", ")")) for mutant in all_mutants())


def test_a_check_states_its_fact_in_a_sentence() -> None:
    assert all(check.title.endswith(".") for check in all_checks())
