"""An engine for scenarios: host pools with few slots, and pages whose bytes follow from their hash."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from engines import DRAFT_SHAPE, PAGE_TOKENS, TARGET_SHAPE
from pages import hash_of, space

from hicache_storage.controller import CacheController, CachePool, Lease
from hicache_storage.host_pool import HostPool
from interleavings.scenario import Scenario
from interleavings.scenarios.storage import content

HASHES = [hash_of(number) for number in range(6)]
_SHAPES = {"kv": TARGET_SHAPE, "draft": DRAFT_SHAPE}


def make_pools(slots: int, *, draft_is_required: bool) -> list[CachePool]:
    """Return a target and a draft pool."""
    return [
        CachePool(
            space=space(pool=name, page_tokens=PAGE_TOKENS, page_nbytes=shape.nbytes),
            host=HostPool(shape, slots=slots, pin=False),
            required=name == "kv" or draft_is_required,
        )
        for name, shape in _SHAPES.items()
    ]


def compute(
    controller: CacheController,
    hashes: Sequence[str],
    timeout_s: float,
    *,
    without: Collection[str] = (),
) -> int:
    """Fill new pages in every pool and commit them. Return how many pages had slots."""
    reservation = controller.reserve(hashes, timeout_s=timeout_s)
    for pool, slots in zip(controller.cache.pools, reservation.slots, strict=True):
        if pool.space.pool not in without:
            for page_hash, slot in zip(reservation.hashes, slots, strict=True):
                pool.host.page(slot).copy_from(_bytes_of(pool, page_hash))
    controller.commit(reservation, without=without)
    return reservation.pages


def recompute_draft(lease: Lease) -> None:
    """Fill the draft pages that a lease lacks and may compute."""
    pool = lease.cache.pools[1]
    claimed = lease.claim("draft")
    for page, slot in claimed.items():
        pool.host.page(slot).copy_from(_bytes_of(pool, lease.entries[page].page_hash))
    lease.fill("draft", claimed)


def check_lease(scenario: Scenario, lease: Lease) -> None:
    """Require that every page of a lease has the bytes of its hash, in each pool that has the page."""
    for pool, pages, slots in zip(lease.cache.pools, lease.indices, lease.slots, strict=True):
        scenario.require(len(pages) == len(slots), f"a page of {pool.space.pool!r} has no slot")
        for page, slot in zip(pages, slots, strict=True):
            expected = _bytes_of(pool, lease.entries[page].page_hash)
            scenario.require(
                pool.host.page(slot).tobytes() == expected,
                f"a leased page of {pool.space.pool!r} has other bytes",
            )


def check_slots(controller: CacheController) -> None:
    """Raise AssertionError if two pages of L2 share a slot, or the slot of a page is free."""
    lock: Any = controller.cache._changed
    if lock.locked():  # no other thread sees a change that is under way
        return
    entries = list(controller.cache._entries.values())
    for number, pool in enumerate(controller.cache.pools):
        slots = [slot for entry in entries if (slot := entry.slots[number]) is not None]
        assert len(set(slots)) == len(slots), f"two pages share a slot of {pool.space.pool!r}"
        allocation = pool.host._allocation
        assert all(map(allocation.is_used, slots)), f"a page has a free slot of {pool.space.pool!r}"


def _bytes_of(pool: CachePool, page_hash: str) -> bytes:
    return content(pool.space.pool, pool.space.page_nbytes, page_hash)
