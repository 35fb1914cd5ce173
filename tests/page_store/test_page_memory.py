"""The page store's own memory: its limit, its reuse, and the pages that are made in it."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

import pytest
from hicache_backends.memory import MemoryStorage

from hicache_storage.page import Page
from hicache_storage.page_store.page_memory import Buffer, PageMemory, stride_nbytes

if TYPE_CHECKING:
    from hicache_storage.page import HostBuffer

KIB = 1 << 10
MIB = 1 << 20
NOW = 0.0


class _Counting(MemoryStorage):
    """A storage that records which memory is registered, and may refuse to register it."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: list[int] = []
        self.refuses = False

    def register_buffer(self, buffer: HostBuffer) -> None:
        if self.refuses:
            raise RuntimeError("no")
        self.registered.append(Page(buffer).nbytes)

    def unregister_buffer(self, buffer: HostBuffer) -> None:
        self.registered.remove(Page(buffer).nbytes)


@pytest.fixture
def storage() -> _Counting:
    return _Counting()


@pytest.fixture
def memory(storage: _Counting) -> PageMemory:
    return PageMemory(storage, 256 * KIB)


def taken(memory: PageMemory, nbytes: int) -> Buffer:
    buffer = memory.take(nbytes, NOW)
    assert buffer is not None
    return buffer


def test_pages_are_aligned_and_apart() -> None:
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


def test_a_buffer_is_registered_once_and_used_again(storage: _Counting, memory: PageMemory) -> None:
    first = taken(memory, 64 * KIB)
    memory.give_back(first)

    assert first is taken(memory, 64 * KIB)
    assert [64 * KIB] == storage.registered


def test_a_smaller_call_uses_a_larger_buffer(storage: _Counting, memory: PageMemory) -> None:
    first = taken(memory, 128 * KIB)
    memory.give_back(first)

    assert first is taken(memory, 64 * KIB)
    assert [128 * KIB] == storage.registered


def test_a_store_that_refuses_the_memory_copies_by_itself(storage: _Counting) -> None:
    storage.refuses = True

    assert 64 * KIB == taken(PageMemory(storage, 64 * KIB), 16 * KIB).view.nbytes


def test_buffers_in_use_do_not_exceed_the_limit(memory: PageMemory) -> None:
    held = [taken(memory, 64 * KIB) for _ in range(4)]

    assert memory.take(64 * KIB, NOW) is None
    memory.give_back(held[0])
    assert held[0] is taken(memory, 64 * KIB)


def test_a_call_that_is_larger_than_the_limit_has_its_turn_alone(memory: PageMemory) -> None:
    small = taken(memory, 64 * KIB)
    assert memory.take(512 * KIB, NOW) is None

    memory.give_back(small)

    assert 512 * KIB == taken(memory, 512 * KIB).view.nbytes


def test_free_buffers_make_room_for_another_size(storage: _Counting, memory: PageMemory) -> None:
    for buffer in [taken(memory, 64 * KIB) for _ in range(4)]:
        memory.give_back(buffer)
    taken(memory, 192 * KIB)

    assert [64 * KIB, 192 * KIB] == storage.registered
    assert (256 * KIB, 192 * KIB) == (memory.nbytes, memory.used_nbytes)


def test_a_buffer_is_hardly_larger_than_its_pages(storage: _Counting) -> None:
    memory = PageMemory(storage, 256 * MIB)
    for nbytes in (16 * MIB + 1, 33 * MIB):
        assert nbytes <= taken(memory, nbytes).view.nbytes <= nbytes * 9 // 8 + MIB


def test_a_call_waits_for_memory_until_its_deadline(memory: PageMemory) -> None:
    buffer = taken(memory, 256 * KIB)
    threading.Timer(0.05, memory.give_back, [buffer]).start()

    assert buffer is memory.take(256 * KIB, 20)


def test_memory_that_cannot_be_mapped_is_not_counted(
    memory: PageMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Buffer, "__init__", _no_memory)
        with pytest.raises(MemoryError):
            memory.take(64 * KIB, NOW)

    assert 0 == memory.nbytes == memory.used_nbytes
    taken(memory, 64 * KIB)


def _no_memory(_: Buffer, __: int) -> None:
    raise MemoryError


def test_close_unregisters_free_buffers_now_and_others_when_they_come_back(
    storage: _Counting, memory: PageMemory
) -> None:
    late, free = taken(memory, 64 * KIB), taken(memory, 128 * KIB)
    memory.give_back(free)
    memory.close()
    assert [64 * KIB] == storage.registered

    memory.give_back(late)

    assert [] == storage.registered
    assert 0 == memory.nbytes == memory.used_nbytes
    assert memory.take(64 * KIB, NOW) is None
