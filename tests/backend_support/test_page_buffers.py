from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hicache_backends.memory import MemoryStorage

from hicache_storage.backend_support.page_buffers import PageBuffers
from hicache_storage.errors import StorageUnavailable
from hicache_storage.page import Page

if TYPE_CHECKING:
    from hicache_storage.page import HostBuffer

MIB = 1 << 20


class Registering(MemoryStorage):
    """A storage that records the buffers that are registered with it."""

    refuses = False

    def __init__(self) -> None:
        super().__init__()
        self.registered: list[int] = []

    def register_buffer(self, buffer: HostBuffer) -> None:
        if self.refuses:
            raise StorageUnavailable("no memory is left to pin")
        self.registered.append(Page(buffer).addresses[0][0])

    def unregister_buffer(self, buffer: HostBuffer) -> None:
        self.ensure_open()
        self.registered.remove(Page(buffer).addresses[0][0])


@pytest.fixture
def storage() -> Registering:
    return Registering()


@pytest.fixture
def buffers(storage: Registering) -> PageBuffers:
    return PageBuffers(storage, most_kept=1)


def lent(buffers: PageBuffers, count: int = 1, nbytes: int = 5000) -> list[int]:
    """Return the addresses of lent pages."""
    with buffers.lend(count, nbytes) as pages:
        assert [nbytes] * count == [page.nbytes for page in pages]
        return [page.addresses[0][0] for page in pages]


@pytest.mark.parametrize("alignment", [1, 4096])
def test_lent_pages_are_aligned_and_do_not_overlap(alignment: int) -> None:
    storage = Registering()
    storage.narrow(alignment=alignment)

    places = lent(PageBuffers(storage, most_kept=1), count=7)

    assert [0] * 7 == [place % max(64, alignment) for place in places]
    assert all(b - a >= 5000 for a, b in pairwise(places))


def test_a_buffer_serves_the_next_call(buffers: PageBuffers, storage: Registering) -> None:
    assert lent(buffers) == lent(buffers)
    assert len(storage.registered) == 1


def test_two_calls_at_once_have_different_buffers(buffers: PageBuffers) -> None:
    with buffers.lend(1, 5000) as first, buffers.lend(1, 5000) as second:
        assert first[0].addresses != second[0].addresses


def test_no_more_buffers_are_kept_than_allowed(buffers: PageBuffers, storage: Registering) -> None:
    with buffers.lend(1, 5000), buffers.lend(1, 5000):
        assert len(storage.registered) == 2

    assert len(storage.registered) == 1


def test_a_larger_call_gets_a_larger_buffer(buffers: PageBuffers, storage: Registering) -> None:
    lent(buffers)
    lent(buffers, nbytes=3 * MIB)

    assert len(storage.registered) == 1


def test_a_buffer_beyond_the_limit_is_neither_kept_nor_registered(
    buffers: PageBuffers, storage: Registering
) -> None:
    with buffers.lend(65, MIB):
        assert [] == storage.registered


def test_close_releases_the_buffers(buffers: PageBuffers, storage: Registering) -> None:
    lent(buffers)
    buffers.close()

    assert [] == storage.registered


def test_a_call_that_ends_after_close_releases_its_own(
    buffers: PageBuffers, storage: Registering
) -> None:
    with buffers.lend(1, 5000):
        buffers.close()

    assert [] == storage.registered


def test_a_closed_storage_is_no_error(buffers: PageBuffers, storage: Registering) -> None:
    with buffers.lend(1, 5000):
        storage.close()
        buffers.close()

    assert len(storage.registered) == 1


def test_memory_that_cannot_be_registered_is_used_all_the_same(
    buffers: PageBuffers, storage: Registering
) -> None:
    storage.refuses = True

    assert lent(buffers) == lent(buffers)
    buffers.close()
