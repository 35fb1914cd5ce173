"""Checks of secrets, on a store whose password is short."""

from __future__ import annotations

import pytest
from hicache_conformance.checks import all_checks
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.run.subject import Subject
from hicache_conformance.selftest.mutants import mutant_named
from hicache_conformance.selftest.references.subjects import RentedSubject
from hicache_conformance.selftest.selftest import subject_for


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
    check = next(one for one in all_checks() if one.run.__name__ == "secrets_are_shown_nowhere")

    record = run_check(subject, check, RunOptions())

    assert outcome is record.outcome
    assert "url" in record.evidence["secrets that are too short to be looked for everywhere"]
    assert "kv:kv@" not in record.got
