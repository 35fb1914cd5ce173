"""The page of the kill matrix agrees with the code."""

from __future__ import annotations

from pathlib import Path

import pytest
from hicache_conformance.checks import all_checks
from hicache_conformance.run.runner import RunOptions
from hicache_conformance.selftest import kill_matrix as module
from hicache_conformance.selftest.kill_matrix import (
    kill_matrix,
    kill_matrix_page,
    kills_in,
    read_kill_matrix,
)
from hicache_conformance.selftest.mutants import all_mutants, mutant_named

PAGE = Path(__file__).parents[3] / "docs" / "kill-matrix.md"


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_the_page_has_every_check_and_every_mutant(page: str) -> None:
    kills = read_kill_matrix(page)

    assert {check.name for check in all_checks()} == set(kills)
    assert {mutant.name for mutant in all_mutants()} == set().union(*kills.values())


def test_each_mutant_stands_in_the_rows_of_its_own_checks(page: str) -> None:
    kills = read_kill_matrix(page)

    for mutant in all_mutants():
        assert all(mutant.name in kills[check] for check in mutant.checks)


def test_the_page_is_what_the_code_makes_of_its_pairs(page: str) -> None:
    """Defects, "seen in", the order and the marks of required pairs on the page agree with the code."""
    assert kill_matrix_page(read_kill_matrix(page)) == page


def test_the_matrix_has_all_checks_of_the_rules_of_a_mutant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant = mutant_named("MovesUpAfterAMiss")
    monkeypatch.setattr(module, "all_mutants", lambda: (mutant,))

    found = list(kill_matrix(RunOptions(quick=True), processes=1))

    assert {check.name for check in all_checks() if check.rule.id == "KV-202" and check.quick} == {
        one.check for one in found
    }
    assert mutant.name in kills_in(found)["KV-202:a_missing_page_changes_no_other"]
