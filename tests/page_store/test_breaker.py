from __future__ import annotations

from collections.abc import Callable

import pytest
from clocks import Clock

from hicache_storage.page_store.breaker import Breakers, CircuitBreaker, Permit


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def admitted(breaker: CircuitBreaker) -> Permit:
    permit = breaker.admit()
    assert permit is not None
    return permit


def opened(cooldown_s: float = 5) -> CircuitBreaker:
    breaker = CircuitBreaker(failures=2, cooldown_s=cooldown_s)
    for _ in range(2):
        admitted(breaker).fail()
    return breaker


def test_it_opens_after_that_many_failures_in_a_row(clock: Clock) -> None:
    breaker = opened()

    assert breaker.state == "open"
    assert breaker.admit() is None
    assert breaker.times_opened == 1


def test_a_success_between_failures_keeps_it_closed(clock: Clock) -> None:
    breaker = CircuitBreaker(failures=2, cooldown_s=5)

    for end in (Permit.fail, Permit.succeed, Permit.fail, Permit.succeed):
        end(admitted(breaker))

    assert breaker.state == "closed"


def test_after_the_cooldown_one_call_probes(clock: Clock) -> None:
    breaker = opened(cooldown_s=5)
    clock.now_s += 5

    assert [True, False, False] == [breaker.admit() is not None for _ in range(3)]
    assert breaker.state == "half_open"


def test_a_probe_that_succeeds_closes_it(clock: Clock) -> None:
    breaker = opened(cooldown_s=5)
    clock.now_s += 5

    admitted(breaker).succeed()

    assert breaker.state == "closed"
    assert breaker.admit()


def test_a_probe_that_fails_starts_the_cooldown_again(clock: Clock) -> None:
    breaker = opened(cooldown_s=5)
    clock.now_s += 5

    admitted(breaker).fail()

    clock.now_s += 4
    assert breaker.admit() is None
    clock.now_s += 1
    assert breaker.admit()


def test_a_dismissed_call_changes_nothing_and_allows_another_probe(clock: Clock) -> None:
    breaker = CircuitBreaker(failures=2, cooldown_s=5)
    admitted(breaker).fail()
    admitted(breaker).dismiss()
    admitted(breaker).fail()
    assert breaker.state == "open"
    clock.now_s += 6

    probe = admitted(breaker)
    assert breaker.admit() is None
    probe.dismiss()
    assert breaker.admit()


def test_a_probe_that_an_exception_ends_does_not_count_and_is_followed_by_another(
    clock: Clock,
) -> None:
    breaker = opened(cooldown_s=5)
    clock.now_s += 5

    with pytest.raises(KeyboardInterrupt), admitted(breaker):
        raise KeyboardInterrupt

    assert breaker.state == "half_open"
    assert breaker.admit()


@pytest.mark.parametrize("end", [Permit.succeed, Permit.fail, Permit.dismiss])
def test_a_call_of_before_the_outage_lets_no_second_probe_in(
    clock: Clock, end: Callable[[Permit], None]
) -> None:
    breaker = CircuitBreaker(failures=2, cooldown_s=5)
    old = admitted(breaker)
    for _ in range(2):
        admitted(breaker).fail()
    clock.now_s += 5
    probe = admitted(breaker)

    end(old)

    assert breaker.admit() is None
    assert breaker.state == "half_open"
    probe.succeed()
    assert breaker.state == "closed"


def test_a_failure_of_before_the_outage_does_not_count_after_it(clock: Clock) -> None:
    breaker = CircuitBreaker(failures=1, cooldown_s=5)
    old = admitted(breaker)
    admitted(breaker).fail()
    clock.now_s += 5
    admitted(breaker).succeed()

    old.fail()

    assert breaker.state == "closed"


def test_only_the_first_result_of_a_call_counts(clock: Clock) -> None:
    breaker = CircuitBreaker(failures=2, cooldown_s=5)
    call = admitted(breaker)

    for _ in range(3):
        call.fail()
    call.succeed()

    assert breaker.state == "closed"
    admitted(breaker).fail()
    assert breaker.state == "open"


def test_a_result_from_elsewhere_can_be_recorded(clock: Clock) -> None:
    breaker = CircuitBreaker(failures=1, cooldown_s=5)

    breaker.record(succeeded=False)
    assert breaker.state == "open"
    breaker.record(succeeded=True)

    assert breaker.state == "closed"


def test_two_breakers_show_the_worse_state_and_count_both(clock: Clock) -> None:
    both = Breakers(
        CircuitBreaker(failures=1, cooldown_s=5), CircuitBreaker(failures=1, cooldown_s=5)
    )
    assert both.state == "closed"

    both.writes.record(succeeded=False)

    assert ("open", "closed", 1) == (both.state, both.reads.state, both.times_opened)
    clock.now_s += 5
    assert both.state == "half_open"
    both.record(succeeded=False)
    assert (both.state, both.times_opened) == ("open", 2)
