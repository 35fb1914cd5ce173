"""Bounce buffers with and without a limit, and the pages that are made in them."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest
from hicache_backends.memory import MemoryStorage

from hicache_storage.moving.buffers import Buffer, Buffers, stride_nbytes
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_storage.page import HostBuffer

KIB = 1 << 10
MIB = 1 << 20
NOW = 0.0


class _Counting(PageStore):
    """A page store that records which memory is registered, and may refuse to register it."""

    def __init__(self) -> None:
        super().__init__(MemoryStorage.from_config({}))
        self.registered: list[int] = []
        self.refuses = False

    def register_buffer(self, buffer: HostBuffer) -> None:
        if self.refuses:
            raise RuntimeError("no")
        self.registered.append(Page(buffer).nbytes)

    def unregister_buffer(self, buffer: HostBuffer) -> None:
        self.registered.remove(Page(buffer).nbytes)


@pytest.fixture
def store() -> Generator[_Counting]:
    with _Counting() as store:
        yield store


@pytest.fixture
def memory(store: _Counting) -> Buffers:
    return Buffers(store, 64 * KIB)


def acquired(memory: Buffers, nbytes: int) -> Buffer:
    buffer = memory.acquire(nbytes, NOW)
    assert buffer is not None
    return buffer


def test_pages_and_headers_are_aligned_and_apart() -> None:
    stride = stride_nbytes(5000, 4096)
    frames = Buffer(4 * stride).frames(5000, 4096, 4)
    places = sorted(place for frame in frames for place in frame.stored.addresses)

    assert {0} == {address % 4096 for address, _ in places}
    assert all(start + nbytes <= end for (start, nbytes), (end, _) in itertools.pairwise(places))


def test_the_framed_pages_of_a_buffer_are_made_once() -> None:
    buffer = Buffer(64 * KIB)
    first = buffer.frames(1000, 128, 3)

    assert list(first) == list(buffer.frames(1000, 128, 8))[:3]


def test_headers_do_not_overlap() -> None:
    buffer = Buffer(4 * KIB)
    buffer.headers(128, 2)
    headers = buffer.headers(128, 5)
    for number, header in enumerate(headers):
        header[:] = bytes([number]) * 128

    assert [bytes([number]) * 128 for number in range(5)] == list(map(bytes, headers))


def test_a_buffer_is_registered_once_and_used_again(store: _Counting, memory: Buffers) -> None:
    first = acquired(memory, 16 * KIB)
    memory.release(first)

    assert first is acquired(memory, 16 * KIB)
    assert [16 * KIB] == store.registered


def test_a_store_that_refuses_the_memory_copies_by_itself(store: _Counting) -> None:
    store.refuses = True

    assert 16 * KIB == acquired(Buffers(store, 64 * KIB), 16 * KIB).nbytes


def test_no_buffer_exceeds_the_limit(memory: Buffers) -> None:
    held = [acquired(memory, 16 * KIB) for _ in range(4)]

    assert memory.acquire(16 * KIB, NOW) is None
    memory.release(held[0])
    assert held[0] is acquired(memory, 16 * KIB)


def test_free_buffers_make_room_for_another_size(store: _Counting, memory: Buffers) -> None:
    for buffer in [acquired(memory, 16 * KIB) for _ in range(4)]:
        memory.release(buffer)
    acquired(memory, 40 * KIB)

    assert [16 * KIB, 40 * KIB] == store.registered
    assert (56 * KIB, 40 * KIB) == (memory.nbytes, memory.used_nbytes)


def test_an_overdue_call_keeps_its_buffer(memory: Buffers) -> None:
    settled = Future[None]()
    buffer = acquired(memory, 64 * KIB)
    memory.release(buffer, settled)

    assert memory.acquire(64 * KIB, NOW) is None
    settled.set_result(None)
    assert buffer is acquired(memory, 64 * KIB)


def test_a_caller_waits_for_a_buffer_until_its_deadline(memory: Buffers) -> None:
    buffer = acquired(memory, 64 * KIB)
    threading.Timer(0.05, memory.release, [buffer]).start()

    assert buffer is memory.acquire(64 * KIB, 20)


def test_memory_that_cannot_be_mapped_is_not_counted(
    memory: Buffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Buffer, "__init__", _no_memory)
        with pytest.raises(MemoryError):
            memory.acquire(64 * KIB, NOW)

    assert 0 == memory.nbytes == memory.used_nbytes
    acquired(memory, 64 * KIB)


def _no_memory(_: Buffer, __: int) -> None:
    raise MemoryError


def test_close_unregisters_free_buffers_now_and_others_when_they_settle(
    store: _Counting, memory: Buffers
) -> None:
    settled = Future[None]()
    overdue, free = acquired(memory, 16 * KIB), acquired(memory, 32 * KIB)
    memory.release(overdue, settled)
    memory.release(free)
    memory.close()

    assert [16 * KIB] == store.registered
    settled.set_result(None)
    assert [] == store.registered
    assert memory.acquire(16 * KIB, NOW) is None


def settled() -> Future[None]:
    done = Future[None]()
    done.set_result(None)
    return done


def used(buffers: Buffers, nbytes: int) -> int:
    """Acquire a buffer, release it, and return its size."""
    buffer = acquired(buffers, nbytes)
    buffers.release(buffer, settled())
    return buffer.nbytes


def test_one_caller_without_a_limit_keeps_one_buffer_of_the_largest_call(store: _Counting) -> None:
    buffers = Buffers(store)
    for nbytes in (MIB // 2, 3 * MIB, 9 * MIB, 2 * MIB, 17 * MIB):
        used(buffers, nbytes)

    assert len(store.registered) == 1
    assert store.registered[0] < 20 * MIB
    buffers.close()
    assert store.registered == []


def test_a_buffer_is_hardly_larger_than_its_pages(store: _Counting) -> None:
    buffers = Buffers(store)
    for nbytes in (16 * MIB + 1, 33 * MIB):
        assert nbytes <= used(buffers, nbytes) <= nbytes * 9 // 8 + MIB
    buffers.close()


def test_without_a_limit_overdue_calls_keep_at_most_four_buffers_until_they_end(
    store: _Counting,
) -> None:
    buffers = Buffers(store)
    overdue: list[Future[None]] = []
    while (buffer := buffers.acquire(MIB, NOW)) is not None:
        overdue.append(Future())
        buffers.release(buffer, overdue[-1])
    assert len(overdue) == 4

    overdue[0].set_result(None)
    assert used(buffers, MIB) == MIB
    assert len(store.registered) == 4
    buffers.close()
