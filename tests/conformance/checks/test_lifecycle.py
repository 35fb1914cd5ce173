"""Checks of a store's life, on right stores of unusual kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hicache_conformance.checks import all_checks
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.selftest.mutants import mutant_named
from hicache_conformance.selftest.references.subjects import (
    OneByOneSubject,
    RentedSubject,
    TinyPagesSubject,
)
from hicache_conformance.selftest.selftest import subject_for

if TYPE_CHECKING:
    from hicache_conformance.report.record import CheckRecord
    from hicache_conformance.run.subject import Subject


def record_of(name: str, subject: type[Subject]) -> CheckRecord:
    check = next(one for one in all_checks() if one.run.__name__ == name)
    return run_check(subject, check, RunOptions())


def test_a_store_of_one_page_a_call_may_be_forked() -> None:
    record = record_of("a_forked_child_works_or_is_refused", OneByOneSubject)

    assert (Outcome.PASSED, "") == (record.outcome, record.message)


@pytest.mark.timeout(200)
def test_the_memory_of_a_store_of_tiny_pages_is_measured() -> None:
    record = record_of("opening_and_closing_keeps_memory", TinyPagesSubject)

    assert (Outcome.PASSED, "") == (record.outcome, record.message)


@pytest.mark.parametrize(
    ("subject", "outcome"),
    [
        (RentedSubject, Outcome.PASSED),
        (subject_for(mutant_named("ShowsAShortPassword")), Outcome.FAILED),
    ],
)
def test_a_short_password_is_looked_for_where_it_is_one(
    subject: type[Subject], outcome: Outcome
) -> None:
    record = record_of("secrets_are_shown_nowhere", subject)

    assert outcome is record.outcome
    assert "url" in record.evidence["secrets that are too short to be looked for everywhere"]
    assert "kv:kv@" not in record.got
