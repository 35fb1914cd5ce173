from __future__ import annotations

import time

import pytest

from hicache_storage.breaker import CircuitBreaker


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    return clock


def opened(cooldown_s: float = 5) -> CircuitBreaker:
    breaker = CircuitBreaker(failures=2, cooldown_s=cooldown_s)
    for _ in range(2):
        assert breaker.admit()
        breaker.record(succeeded=False)
    return breaker


def test_it_opens_after_that_many_failures_in_a_row(clock: Clock) -> None:
    breaker = opened()

    assert breaker.state == "open"
    assert not breaker.admit()
    assert breaker.times_opened == 1


def test_a_success_between_failures_keeps_it_closed(clock: Clock) -> None:
    breaker = CircuitBreaker(failures=2, cooldown_s=5)

    for succeeded in (False, True, False, True, False):
        assert breaker.admit()
        breaker.record(succeeded=succeeded)

    assert breaker.state == "closed"


def test_after_the_cooldown_one_call_probes(clock: Clock) -> None:
    breaker = opened(cooldown_s=5)
    clock.now_s += 5

    assert [True, False, False] == [breaker.admit() for _ in range(3)]
    assert breaker.state == "half_open"


def test_a_probe_that_succeeds_closes_it(clock: Clock) -> None:
    breaker = opened(cooldown_s=5)
    clock.now_s += 5
    assert breaker.admit()

    breaker.record(succeeded=True)

    assert breaker.state == "closed"
    assert breaker.admit()


def test_a_probe_that_fails_starts_the_cooldown_again(clock: Clock) -> None:
    breaker = opened(cooldown_s=5)
    clock.now_s += 5
    assert breaker.admit()

    breaker.record(succeeded=False)

    clock.now_s += 4
    assert not breaker.admit()
    clock.now_s += 1
    assert breaker.admit()


def test_a_call_that_tells_nothing_changes_nothing_and_lets_another_probe(clock: Clock) -> None:
    breaker = CircuitBreaker(failures=2, cooldown_s=5)
    breaker.record(succeeded=False)
    breaker.dismiss()
    breaker.record(succeeded=False)
    assert breaker.state == "open"
    clock.now_s += 6

    assert breaker.admit()
    assert not breaker.admit()
    breaker.dismiss()
    assert breaker.admit()
