from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from processes import in_a_fork

from hicache_storage.backend_support.fork_local import ForkLocal

LIMIT_S = 30.0


@dataclass(eq=False)
class Session:
    """A resource of one process, which records when it is closed."""

    pid: int = field(default_factory=os.getpid)
    done: list[str] = field(default_factory=list[str])

    def close(self) -> None:
        self.done.append("close")

    def abandon(self) -> None:
        self.done.append("abandon")


def sessions(make: Callable[[], Session] = Session) -> ForkLocal[Session]:
    return ForkLocal(make, close=Session.close, abandon=Session.abandon)


def test_a_process_keeps_what_it_made() -> None:
    one = sessions()

    assert one.get() is one.get()
    assert os.getpid() == one.get().pid


def test_a_forked_child_makes_its_own_and_abandons_its_parents_once() -> None:
    one = sessions()
    parents = one.get()

    def tell() -> tuple[bool, bool, list[str]]:
        own = one.get()
        return own.pid == os.getpid(), own is one.get(), parents.done

    assert (True, True, ["abandon"]) == in_a_fork(tell)
    assert [] == parents.done


def test_a_child_that_never_used_it_closes_nothing_of_its_parents() -> None:
    one = sessions()
    parents = one.get()

    def tell() -> list[str]:
        one.close()
        one.close()
        return parents.done

    assert ["abandon"] == in_a_fork(tell)


def test_a_forked_child_lets_go_of_its_parents_before_it_uses_anything() -> None:
    one = sessions()
    parents = one.get()

    assert ["abandon"] == in_a_fork(lambda: parents.done)
    assert [] == parents.done


def test_a_child_that_is_done_with_it_ends_nothing_of_its_parents() -> None:
    """A client's finalizer would end its session on the connection that the parent still uses."""
    ended: list[int] = []

    class Connection:
        def __init__(self) -> None:
            self.pid = os.getpid()

        def __del__(self) -> None:
            ended.append(self.pid)

    def nothing(_: Connection) -> None:
        pass

    kept = [ForkLocal(Connection, close=nothing)]

    def tell() -> list[bool]:
        assert kept[0].get().pid == os.getpid()
        kept.clear()
        gc.collect()
        return [pid == os.getpid() for pid in ended]

    assert [True] == in_a_fork(tell)
    assert kept


def test_a_descendant_with_the_number_of_its_ancestor_uses_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel reuses process ids, and in small containers it does so soon."""
    one, ancestor = sessions(), os.getpid()

    def tell() -> bool:
        monkeypatch.setattr(os, "getpid", lambda: ancestor)
        parents = one._value
        return one.get() is not parents

    assert in_a_fork(tell)


def test_a_failed_release_in_a_child_does_not_prevent_the_others() -> None:
    def fail(_: Session) -> None:
        raise ConnectionError("down")

    stubborn = ForkLocal(Session, close=Session.close, abandon=fail)
    one = sessions()
    parents = one.get()

    assert ["abandon"] == in_a_fork(lambda: parents.done)
    assert [] == stubborn.get().done


def test_threads_of_a_child_share_one() -> None:
    one = sessions()
    barrier = threading.Barrier(4)

    def tell() -> int:
        seen: list[Session] = []

        def use() -> None:
            barrier.wait(LIMIT_S)
            seen.append(one.get())

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        return len({id(session) for session in seen})

    assert 1 == in_a_fork(tell)


def test_a_fork_while_another_thread_closes_it_leaves_the_child_able_to_use_it() -> None:
    closing, done = threading.Event(), threading.Event()

    def close(_: Session) -> None:
        closing.set()
        assert done.wait(LIMIT_S)

    one = ForkLocal(Session, close=close)
    thread = threading.Thread(target=one.close)
    thread.start()
    try:
        assert closing.wait(LIMIT_S)
        assert in_a_fork(lambda: one.get().pid == os.getpid())
    finally:
        done.set()
        thread.join(LIMIT_S)


def test_a_failed_construction_is_tried_again() -> None:
    attempts: list[int] = []

    def make() -> Session:
        attempts.append(os.getpid())
        if len(attempts) == 2:
            raise ConnectionError("down")
        return Session()

    one = sessions(make)
    parents = one.get()

    def tell() -> tuple[int, list[str]]:
        with pytest.raises(ConnectionError):
            one.get()
        one.get()
        return len(attempts), parents.done

    assert (3, ["abandon"]) == in_a_fork(tell)


def test_renewing_closes_the_old_one_first() -> None:
    one = sessions()
    old = one.get()

    one.renew()

    assert ["close"] == old.done
    assert old is not one.get()
