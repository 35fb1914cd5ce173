"""The queue of victims of the `file` backend, and its thread."""

from __future__ import annotations

import threading

import pytest
from hicache_backends.file.victims import VictimQueue
from hicache_backends.file.victims_file import Victim

from hicache_storage.backend_support.deadline import Deadline

LIMIT_S = 60.0


def nothing_more(_: int) -> tuple[list[Victim], bool]:
    """Return the list of a store without a list."""
    return [], False


def nothing_sampled(_: Deadline) -> list[Victim]:
    """Return the sample of a store without pages."""
    return []


class TestVictims:
    def test_a_wait_for_the_first_scan_requests_no_second(self) -> None:
        """A scan in the middle of the first batch would see its head only, and evict the head."""
        may_end = threading.Event()
        scans: list[bool] = []

        def scan() -> list[Victim]:
            scans.append(may_end.wait(20))
            return []

        victims = VictimQueue(scan, nothing_more, nothing_sampled)
        first = victims.request_scan()
        assert not victims.await_scan(first, 0.01)
        may_end.set()
        assert victims.await_scan(first, 20)
        victims.close(Deadline(20))

        assert [True] == scans

    def test_new_pages_end_the_pause_after_a_scan_without_victims(self) -> None:
        found: list[Victim] = []
        victims = VictimQueue(lambda: list(found), nothing_more, nothing_sampled)
        assert victims.next(Deadline(20)) is None
        found.append(Victim(1, 4096, "page"))
        assert victims.next(Deadline(20)) is None

        victims.note_new_pages()

        assert found == [victims.next(Deadline(20))]
        victims.close(Deadline(20))


def test_a_thread_that_could_not_start_is_started_by_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container may reach its limit of threads for a while."""
    victim = Victim(1, 2, "path")
    victims = VictimQueue(lambda: [victim], lambda _: ([], False), lambda _: [])

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            victims.next(Deadline(1))
        victims.close(Deadline(1))

    victims = VictimQueue(lambda: [victim], lambda _: ([], False), lambda _: [])
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            victims.next(Deadline(1))
    assert victims.await_scan(victims.request_scan(), LIMIT_S)
    assert victim == victims.next(Deadline(LIMIT_S))
    victims.close(Deadline(LIMIT_S))


def test_victims_are_taken_up_to_a_sum_of_bytes_and_put_back_in_order() -> None:
    found = [Victim(number, 10, str(number)) for number in range(6)]
    victims = VictimQueue(lambda: list(found), lambda _: ([], False), lambda _: [])

    assert found[:3] == victims.take(25, Deadline(LIMIT_S))
    victims.put_back(found[1:3])
    assert found[1:] == victims.take(1000, Deadline(LIMIT_S))
    victims.close(Deadline(LIMIT_S))
