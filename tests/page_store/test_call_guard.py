from __future__ import annotations

from servers import wait_until

from hicache_storage.page_store.call_guard import CallGuard


def test_a_call_that_runs_too_long_has_failed() -> None:
    guard = CallGuard(timeout_s=0.01, failures=1, cooldown_s=60)
    permit = guard.admit()
    guard.begin(permit)
    wait_until(lambda: len(guard.overdue()) == 1)

    assert guard.admit() is None


def test_a_call_that_ends_in_time_has_not() -> None:
    guard = CallGuard(timeout_s=60, failures=1, cooldown_s=60)
    permit = guard.admit()
    assert permit is not None
    call = guard.begin(permit)
    assert [call] == guard.of(permit)
    assert 1 == guard.running_count
    guard.end(call)
    permit.succeed()

    assert guard.admit() is not None
    assert [] == guard.of(permit)
