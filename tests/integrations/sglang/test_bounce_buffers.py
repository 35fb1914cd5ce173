"""Buffers between SGLang's host pools and stores that are not bounded."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest
from hicache_backends.memory import MemoryStorage

from hicache_storage.integrations.sglang._bounce_buffers import BounceBuffers
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_storage.page import HostBuffer

MIB = 1 << 20


class _Counting(PageStore):
    """A page store that records the registered memory."""

    def __init__(self) -> None:
        super().__init__(MemoryStorage.from_config({}))
        self.registered: list[int] = []

    def register_buffer(self, buffer: HostBuffer) -> None:
        self.registered.append(Page(buffer).nbytes)

    def unregister_buffer(self, buffer: HostBuffer) -> None:
        self.registered.remove(Page(buffer).nbytes)


@pytest.fixture
def store() -> Generator[_Counting]:
    with _Counting() as store:
        yield store


def settled() -> Future[None]:
    done = Future[None]()
    done.set_result(None)
    return done


def used(bounce: BounceBuffers, nbytes: int) -> int:
    """Acquire a buffer, release it, and return its size."""
    buffer = bounce.acquire(nbytes)
    assert buffer is not None
    bounce.release(buffer, settled())
    return buffer.nbytes


def test_one_caller_keeps_one_buffer_of_the_largest_call(store: _Counting) -> None:
    bounce = BounceBuffers(store)
    for nbytes in (MIB // 2, 3 * MIB, 9 * MIB, 2 * MIB, 17 * MIB):
        used(bounce, nbytes)

    assert len(store.registered) == 1
    assert store.registered[0] < 20 * MIB
    bounce.close()
    assert store.registered == []


def test_a_buffer_is_hardly_larger_than_its_pages(store: _Counting) -> None:
    bounce = BounceBuffers(store)
    for nbytes in (16 * MIB + 1, 33 * MIB):
        assert nbytes <= used(bounce, nbytes) <= nbytes * 9 // 8 + MIB
    bounce.close()


def test_overdue_calls_keep_at_most_four_buffers_until_they_end(store: _Counting) -> None:
    bounce = BounceBuffers(store)
    overdue: list[Future[None]] = []
    while (buffer := bounce.acquire(MIB)) is not None:
        overdue.append(Future())
        bounce.release(buffer, overdue[-1])
    assert len(overdue) == 4

    overdue[0].set_result(None)
    assert used(bounce, MIB) == MIB
    assert len(store.registered) == 4
    bounce.close()
