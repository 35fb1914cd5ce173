from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from servers import wait_until

from hicache_storage.backend_support.single_flight import SingleFlight
from hicache_storage.errors import StorageUnavailable


class SlowCall:
    """A call that waits for `go_on`, and counts its runs."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.runs = 0

    def __call__(self) -> int:
        self.runs += 1
        assert self.go_on.wait(30)
        return self.runs


@pytest.fixture
def call() -> Iterator[SlowCall]:
    call = SlowCall()
    yield call
    call.go_on.set()


def test_callers_share_the_call_in_flight(call: SlowCall) -> None:
    single = SingleFlight("test", call)
    first, second = single.begin(), single.begin()
    call.go_on.set()

    assert first is second
    assert first.result(10) == call.runs == 1


def test_a_new_call_begins_after_the_last_one_has_ended(call: SlowCall) -> None:
    single = SingleFlight("test", call)
    call.go_on.set()

    assert [1, 2] == [single.begin().result(10), single.begin().result(10)]


def test_a_wait_for_idle_begins_no_call_and_ends_with_the_running_one(call: SlowCall) -> None:
    single = SingleFlight("test", call)
    single.wait_idle(10)
    assert call.runs == 0

    flight = single.begin()
    single.wait_idle(0.01)
    assert not flight.done()
    call.go_on.set()
    single.wait_idle(10)
    assert flight.done()


def test_a_wait_has_a_limit_and_the_call_continues(call: SlowCall) -> None:
    single = SingleFlight("test", call)

    assert single.wait(0.01) is None
    assert single.age_s() > 0
    flight = single.begin()
    call.go_on.set()

    assert flight.result(10) == 1
    assert single.age_s() == 0.0


def test_a_wait_returns_the_call_that_has_ended(call: SlowCall) -> None:
    call.go_on.set()
    flight = SingleFlight("test", call).wait(10)

    assert flight is not None
    assert flight.result(0) == 1


def test_callers_share_the_error() -> None:
    def fail() -> None:
        raise SystemExit(3)

    single = SingleFlight("test", fail)
    flight = single.wait(10)

    assert flight is not None
    assert isinstance(flight.exception(0), SystemExit)


def test_without_a_thread_no_call_is_in_flight(
    call: SlowCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    single = SingleFlight("test", call)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(StorageUnavailable, match="cannot start a thread"):
            single.begin()
    call.go_on.set()

    assert single.begin().result(10) == 1


def test_its_thread_is_a_daemon(call: SlowCall) -> None:
    flight = SingleFlight("hicache-test-flight", call).begin()
    wait_until(lambda: call.runs == 1)

    (thread,) = [each for each in threading.enumerate() if each.name == "hicache-test-flight"]
    assert thread.daemon
    call.go_on.set()
    flight.result(10)
