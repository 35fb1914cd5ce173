"""Host pools: slots, pages of tiles, and the end of a pool."""

from __future__ import annotations

import collections
import gc
import sys
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from host_pages import MHA, SLOTS, fill, flat_page

from hicache_storage.host_pool import LAYOUTS, HostPool, Tile
from hicache_storage.host_pool import pool as pool_module


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    """Switch threads as often as possible."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


# --- slots ---------------------------------------------------------------------------------------


def test_an_allocation_is_all_or_nothing() -> None:
    with HostPool(MHA, slots=4) as pool:
        pool.allocate(2)

        assert pool.allocate(3) is None
        assert 2 == pool.free_slots
        assert [2, 3] == pool.allocate(2)


def test_an_allocation_of_nothing_succeeds_in_a_full_pool() -> None:
    with HostPool(MHA, slots=1) as pool:
        pool.allocate(1)

        assert [] == pool.allocate(0)


@pytest.mark.parametrize(
    ("slots", "named"),
    [([0, 1, 0], 0), ([1, 2], 2), ([0, 3], 3), ([0, -1], -1), ([0, 4], 4)],
    ids=["twice in a call", "freed before", "never allocated", "negative", "out of range"],
)
def test_a_wrong_free_names_the_slot_and_frees_nothing(slots: list[int], named: int) -> None:
    with HostPool(MHA, slots=4) as pool:
        pool.allocate(3)
        pool.free([2])

        with pytest.raises(ValueError, match=f"slot {named} is not in use"):
            pool.free(slots)
        assert 2 == pool.free_slots
        assert [3, 2] == pool.allocate(2)
        pool.free([0, 1, 2, 3])


def test_slots_may_be_numpy_integers() -> None:
    with HostPool(MHA, slots=4) as pool:
        pool.free(np.array(pool.allocate(4)))

        assert 4 == pool.free_slots


@pytest.mark.usefixtures("frequent_thread_switches")
def test_no_slot_is_given_to_two_threads() -> None:
    slots, threads, rounds = 16, 8, 3000
    held: collections.Counter[int] = collections.Counter()
    clashes: list[int] = []
    ready = threading.Barrier(threads)

    def work() -> None:
        ready.wait(timeout=10)
        for number in range(rounds):
            taken = pool.allocate(1 + number % 7)
            if taken is None:
                continue
            for slot in taken:
                held[slot] += 1
                if held[slot] != 1:
                    clashes.append(slot)
            for slot in taken:
                held[slot] -= 1
            pool.free(taken)

    with HostPool(MHA, slots=slots) as pool:
        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=30)

        assert [] == clashes
        assert slots == pool.free_slots
        everything = pool.allocate(slots)
        assert everything is not None
        assert list(range(slots)) == sorted(everything)


# --- tiles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tiles_page_is_cached(layout: str) -> None:
    """A slot never moves, so its page objects are cached. Each tile has a page of its own."""
    tiles = [Tile((0, 1)), Tile((1, MHA.layers))]
    with HostPool(MHA, slots=SLOTS, layout=layout, tiles=tiles) as pool:
        first = [pool.tile_page(slot, tile) for slot in range(SLOTS) for tile in range(2)]
        again = [pool.tile_page(slot, tile) for slot in range(SLOTS) for tile in range(2)]

        assert len({id(page) for page in first}) == 2 * SLOTS
        assert all(one is other for one, other in zip(first, again, strict=True))
        for slot, tile in [(0, 2), (0, -1), (1, -2), (-1, 1), (SLOTS, 0)]:
            with pytest.raises(ValueError, match="there is no"):
                pool.tile_page(slot, tile)


def test_the_number_of_cached_views_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "_MAX_CACHED_VIEWS", 2)
    with HostPool(MHA, slots=SLOTS) as pool:
        first = [pool.tile_page(slot) for slot in range(SLOTS)]
        again = [pool.tile_page(slot) for slot in range(SLOTS)]

        assert [n == 0 for n in range(SLOTS)] == [a is b for a, b in zip(first, again, strict=True)]
        assert [a.addresses for a in first] == [b.addresses for b in again]


def test_a_pool_has_one_buffer() -> None:
    with HostPool(MHA, slots=SLOTS) as pool:
        assert [SLOTS * MHA.nbytes] == [buffer.nbytes for buffer in pool.buffers]


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_page_of_no_slot_is_refused(slot: int) -> None:
    with HostPool(MHA, slots=SLOTS) as pool:
        with pytest.raises(ValueError, match=f"no slot {slot}"):
            pool.page(slot)
        with pytest.raises(ValueError, match=f"no slot {slot}"):
            pool.tile_page(slot)


# --- the end -------------------------------------------------------------------------------------


def test_close_is_idempotent() -> None:
    pool = HostPool(MHA, slots=1)
    pool.close()
    pool.close()


def test_a_closed_pool_gives_no_memory() -> None:
    pool = HostPool(MHA, slots=1)
    pool.close()

    for refused in (lambda: pool.page(0), lambda: pool.tile_page(0), pool.arrays, pool.tensors):
        with pytest.raises(ValueError, match="this host pool was closed"):
            refused()


def test_views_outlive_the_pool() -> None:
    """Views keep the memory alive. `close` does not fail and does not unmap it."""
    pool = HostPool(MHA, slots=SLOTS)
    fill(pool)
    borrowed, tile = pool.page(1), pool.tile_page(1)
    (keys, _), (tensor, _) = pool.arrays(), pool.tensors()
    pool.close()
    del pool
    gc.collect()

    assert flat_page(MHA, "page_first", 1).tobytes() == borrowed.tobytes()
    assert borrowed.tobytes() == tile.tobytes()
    assert keys.tobytes() == tensor.view(torch.uint8).numpy().tobytes()


def test_the_last_view_unmaps_the_memory() -> None:
    pool = HostPool(MHA, slots=SLOTS)
    memory = weakref.ref(pool.buffers[0].obj)
    borrowed = pool.tile_page(0)
    pool.close()

    assert memory() is not None
    del borrowed
    assert memory() is None
