"""Buffers between SGLang's host pools and stores that are not bounded."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest
import xxhash
from hicache_backends.memory import MemoryStorage
from pages import hash_of, page, space

from hicache_storage.integrations.sglang._bounce_buffers import (
    BounceBuffer,
    BounceBuffers,
    buffer_nbytes,
    copy_from_mirrors,
    copy_to_mirrors,
)
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore
from hicache_storage.page_store.frame import FRAME_NBYTES, FramedPage
from hicache_storage.page_store.results import Transfer

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
    return buffer.memory.nbytes


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


def transfers_of(*seeds: int) -> list[Transfer]:
    pages = [FramedPage(memoryview(bytearray(FRAME_NBYTES)), page(seed=seed)) for seed in seeds]
    return [Transfer(space(), [hash_of(seed) for seed in seeds], pages)]


def test_mirrors_get_the_bytes_and_their_digests() -> None:
    transfers = transfers_of(1, 2)
    mirrors = BounceBuffer(buffer_nbytes(transfers)).mirrors(transfers)

    copy_to_mirrors(transfers, mirrors, checksum=True)

    payloads = [copy.payload for copy in mirrors[0].pages]
    assert [page(seed=1).tobytes(), page(seed=2).tobytes()] == [one.tobytes() for one in payloads]
    assert [xxhash.xxh3_64_intdigest(one.tobytes()) for one in payloads] == [
        one.digest for one in payloads
    ]


def test_transfers_of_the_same_sizes_have_the_same_mirrors() -> None:
    first, second = transfers_of(1, 2), transfers_of(3, 4)
    buffer = BounceBuffer(buffer_nbytes(first))
    frames, again = (buffer.mirrors(transfers)[0] for transfers in (first, second))

    assert list(map(id, frames.pages)) == list(map(id, again.pages))
    assert again.hashes == second[0].hashes


def test_transfers_of_other_sizes_have_other_mirrors() -> None:
    few, many = transfers_of(1), transfers_of(3, 4)
    buffer = BounceBuffer(buffer_nbytes(many))
    buffer.mirrors(few)

    assert 2 == len(buffer.mirrors(many)[0].pages)


def test_only_complete_pages_are_copied_back() -> None:
    transfers, other = transfers_of(1, 2), transfers_of(3, 4)
    mirrors = BounceBuffer(buffer_nbytes(transfers)).mirrors(transfers)
    copy_to_mirrors(other, mirrors, checksum=False)

    copy_from_mirrors(transfers, mirrors, [False, True])

    found = [copy.payload.tobytes() for copy in transfers[0].pages]
    assert [page(seed=1).tobytes(), page(seed=4).tobytes()] == found
