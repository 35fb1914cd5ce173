"""Private memory of a job runner, and the use of the engine's memory."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest
from hicache_backends.memory import MemoryStorage
from pages import page

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.integrations._private_memory import (
    PrivateBuffer,
    PrivateMemory,
    stride_nbytes,
)
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_storage.page import HostBuffer

KIB = 1 << 10
NOW = 0.0


class _Counting(PageStore):
    """A page store that records the registered memory, and may refuse it."""

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
def memory(store: _Counting) -> PrivateMemory:
    return PrivateMemory(store, 64 * KIB)


def acquired(memory: PrivateMemory, nbytes: int) -> PrivateBuffer:
    buffer = memory.acquire(nbytes, Deadline(NOW))
    assert buffer is not None
    return buffer


def test_pages_and_headers_are_aligned_and_apart() -> None:
    stride = stride_nbytes(5000, 4096)
    frames = PrivateBuffer(4 * stride).frames(5000, 4096, 4)
    places = sorted(place for frame in frames for place in frame.stored.addresses)

    assert {0} == {address % 4096 for address, _ in places}
    assert all(start + nbytes <= end for (start, nbytes), (end, _) in itertools.pairwise(places))


def test_the_framed_pages_of_a_buffer_are_made_once() -> None:
    buffer = PrivateBuffer(64 * KIB)
    first = buffer.frames(1000, 128, 3)

    assert list(first) == list(buffer.frames(1000, 128, 8))[:3]


def test_headers_for_other_pages_do_not_overlap() -> None:
    pages = [page(seed=number) for number in range(5)]
    buffer = PrivateBuffer(4 * KIB)
    buffer.frames_of(pages[:2], 128)
    frames = buffer.frames_of(pages, 128)
    for number, frame in enumerate(frames):
        frame.header[:] = bytes([number]) * 128

    assert [bytes([number]) * 128 for number in range(5)] == [bytes(each.header) for each in frames]
    assert pages == [frame.payload for frame in frames]


def test_a_buffer_is_registered_once_and_used_again(
    store: _Counting, memory: PrivateMemory
) -> None:
    first = acquired(memory, 16 * KIB)
    memory.release(first)

    assert first is acquired(memory, 16 * KIB)
    assert [16 * KIB] == store.registered


def test_a_store_that_refuses_the_memory_copies_by_itself(store: _Counting) -> None:
    store.refuses = True

    assert 16 * KIB == acquired(PrivateMemory(store, 64 * KIB), 16 * KIB).nbytes


def test_no_buffer_exceeds_the_limit(memory: PrivateMemory) -> None:
    held = [acquired(memory, 16 * KIB) for _ in range(4)]

    assert memory.acquire(16 * KIB, Deadline(NOW)) is None
    memory.release(held[0])
    assert held[0] is acquired(memory, 16 * KIB)


def test_free_buffers_make_room_for_another_size(store: _Counting, memory: PrivateMemory) -> None:
    for buffer in [acquired(memory, 16 * KIB) for _ in range(4)]:
        memory.release(buffer)
    acquired(memory, 40 * KIB)

    assert [16 * KIB, 40 * KIB] == store.registered
    assert (56 * KIB, 40 * KIB) == (memory.nbytes, memory.used_nbytes)


def test_an_overdue_call_keeps_its_buffer(memory: PrivateMemory) -> None:
    settled = Future[None]()
    buffer = acquired(memory, 64 * KIB)
    memory.release(buffer, settled)

    assert memory.acquire(64 * KIB, Deadline(NOW)) is None
    settled.set_result(None)
    assert buffer is acquired(memory, 64 * KIB)


def test_a_caller_waits_for_a_buffer_until_its_deadline(memory: PrivateMemory) -> None:
    buffer = acquired(memory, 64 * KIB)
    threading.Timer(0.05, memory.release, [buffer]).start()

    assert buffer is memory.acquire(64 * KIB, Deadline(20))


def test_memory_that_cannot_be_mapped_is_not_counted(
    memory: PrivateMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(PrivateBuffer, "__init__", _no_memory)
        with pytest.raises(MemoryError):
            memory.acquire(64 * KIB, Deadline(NOW))

    assert 0 == memory.nbytes == memory.used_nbytes
    acquired(memory, 64 * KIB)


def _no_memory(_: PrivateBuffer, __: int) -> None:
    raise MemoryError


def test_close_unregisters_free_buffers_now_and_others_when_they_settle(
    store: _Counting, memory: PrivateMemory
) -> None:
    settled = Future[None]()
    overdue, free = acquired(memory, 16 * KIB), acquired(memory, 32 * KIB)
    memory.release(overdue, settled)
    memory.release(free)
    memory.close()

    assert [16 * KIB] == store.registered
    settled.set_result(None)
    assert [] == store.registered
    assert memory.acquire(16 * KIB, Deadline(NOW)) is None
