from __future__ import annotations

import threading

import pytest
from processes import in_a_fork

from hicache_storage.backend_support.shared_resource import CallGate, SharedResource
from hicache_storage.errors import StorageClosed


class Environment:
    """A resource that records when it is closed."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def close(self) -> None:
        self.ends.append("close")

    def abandon(self) -> None:
        self.ends.append("abandon")


@pytest.fixture
def shared() -> SharedResource[Environment]:
    return SharedResource(Environment, close=Environment.close, abandon=Environment.abandon)


class TestGate:
    def test_no_call_begins_after_the_close(self) -> None:
        gate = CallGate()
        assert gate.begin()
        gate.close()

        assert not gate.begin()
        assert gate.closed
        assert gate.calls == 1

    def test_the_close_ends_an_idle_gate_once(self) -> None:
        gate = CallGate()
        assert gate.begin()
        assert not gate.end()

        assert [True, False] == [gate.close(), gate.close()]

    def test_the_last_call_ends_a_closed_gate(self) -> None:
        gate = CallGate()
        assert gate.begin()
        assert gate.begin()

        assert not gate.close()
        assert [False, True] == [gate.end(), gate.end()]
        assert not gate.close()

    def test_waiting_for_calls_has_a_limit(self) -> None:
        gate = CallGate()
        assert gate.begin()
        assert not gate.wait_until_idle(0.01)

        ending = threading.Timer(0.01, gate.end)
        ending.start()

        assert gate.wait_until_idle(20)
        ending.join(20)


class TestResource:
    def test_calls_share_the_resource(self, shared: SharedResource[Environment]) -> None:
        with shared.use() as first, shared.use() as second:
            assert first is second

    def test_the_close_closes_an_idle_resource_once(
        self, shared: SharedResource[Environment]
    ) -> None:
        with shared.use() as environment:
            pass
        shared.close()
        shared.close()

        assert ["close"] == environment.ends
        with pytest.raises(StorageClosed), shared.use():
            pass

    def test_the_last_call_closes_the_resource(self, shared: SharedResource[Environment]) -> None:
        with shared.use() as environment, shared.use():
            shared.close()
            assert [] == environment.ends

        assert ["close"] == environment.ends

    def test_a_call_that_fails_is_no_longer_in_flight(
        self, shared: SharedResource[Environment]
    ) -> None:
        with pytest.raises(ValueError, match="no"), shared.use() as environment:
            raise ValueError("no")
        shared.close()

        assert ["close"] == environment.ends

    def test_a_forked_child_has_its_own_resource_and_no_call_in_flight(
        self, shared: SharedResource[Environment]
    ) -> None:
        with shared.use() as parents:

            def child() -> tuple[bool, list[str], list[str]]:
                with shared.use() as own:
                    pass
                shared.close()
                return own is not parents, own.ends, parents.ends

            assert (True, ["close"], ["abandon"]) == in_a_fork(child)
            assert [] == parents.ends

    def test_a_resource_that_was_closed_stays_closed_in_a_forked_child(
        self, shared: SharedResource[Environment]
    ) -> None:
        shared.close()

        def child() -> bool:
            try:
                with shared.use():
                    return False
            except StorageClosed:
                return True

        assert in_a_fork(child)
