from __future__ import annotations

import pytest
from clocks import Clock

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.durations import MAX_DURATION_S
from hicache_storage.errors import StorageTimeout


def test_the_remaining_time_shrinks_and_stops_at_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    deadline = Deadline(2.0)
    clock.now_s += 0.5
    half = deadline.remaining_s()
    clock.now_s += 5

    assert (half, deadline.remaining_s()) == (1.5, 0.0)


def test_it_has_passed_at_its_very_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    deadline = Deadline(2.0)
    before = deadline.passed()
    clock.now_s += 2.0

    assert (before, deadline.passed()) == (False, True)


def test_a_step_without_time_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    deadline = Deadline(2.5)
    deadline.check("the name look-up")
    clock.now_s += 3

    with pytest.raises(StorageTimeout, match=r"the name look-up did not end within 2\.5 s"):
        deadline.check("the name look-up")


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e12])
def test_a_limit_that_no_lock_can_wait_for_is_the_longest_one(timeout_s: float) -> None:
    assert Deadline(timeout_s).timeout_s == MAX_DURATION_S
