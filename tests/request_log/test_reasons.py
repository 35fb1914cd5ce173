"""Each verdict of a page store has a reason of its own in the log."""

from __future__ import annotations

from hicache_storage.page_store import Verdict
from hicache_storage.request_log import Reason


def test_every_verdict_but_ok_and_an_error_of_the_store_is_told_apart() -> None:
    verdicts = [verdict for verdict in Verdict if verdict not in (Verdict.OK, Verdict.ERROR)]
    reasons = [Reason.of(verdict) for verdict in verdicts]

    assert len({*reasons, Reason.STORE_ERROR}) == len(verdicts) + 1


def test_a_page_that_a_lookup_misses_is_absent_and_one_that_a_load_misses_has_vanished() -> None:
    assert Reason.of_lookup(Verdict.MISS) is Reason.ABSENT
    assert Reason.of(Verdict.MISS) is Reason.VANISHED
    assert Reason.of_lookup(Verdict.BREAKER_OPEN) is Reason.BREAKER_OPEN
