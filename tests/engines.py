"""The engine's part in tests of the controller: pools, and pages whose bytes follow from their key."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from pages import hash_of, space

from hicache_storage.controller import CachePool
from hicache_storage.frame import FRAME_NBYTES
from hicache_storage.host_pool import HostPool, PageShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.controller import CacheController, Lease

PAGE_TOKENS = 16
TARGET_SHAPE = PageShape.mha(
    page_tokens=PAGE_TOKENS, layers=2, heads=2, head_dim=4, dtype="bfloat16"
)
DRAFT_SHAPE = PageShape.mha(
    page_tokens=PAGE_TOKENS, layers=1, heads=2, head_dim=4, dtype="bfloat16"
)
PROMPT = [hash_of(number) for number in range(16)]


def cache_pools(slots: int = 32, *, draft_slots: int | None = None) -> list[CachePool]:
    """A target and a draft pool of small pages."""
    shapes = {"kv": (TARGET_SHAPE, slots), "draft": (DRAFT_SHAPE, draft_slots or slots)}
    return [
        CachePool(
            space=space(pool=name, page_tokens=PAGE_TOKENS, page_nbytes=shape.nbytes),
            host=HostPool(shape, slots=count, frame_nbytes=FRAME_NBYTES),
        )
        for name, (shape, count) in shapes.items()
    ]


def content(pool: CachePool, page_hash: str) -> bytes:
    """The bytes of a page: a function of its key space and hash, and of nothing else."""
    seed = hashlib.sha256(f"{pool.space.id}{page_hash}".encode()).digest()
    return (seed * (pool.space.page_nbytes // len(seed) + 1))[: pool.space.page_nbytes]


def compute(controller: CacheController, hashes: Sequence[str], *, timeout_s: float = 20) -> int:
    """Prefill: fill new pages in every pool and commit them; how many there was room for."""
    reservation = controller.reserve(hashes, timeout_s=timeout_s)
    for pool, slots in zip(controller.cache.pools, reservation.slots, strict=True):
        for page_hash, slot in zip(reservation.hashes, slots, strict=True):
            pool.host.page(slot).copy_from(content(pool, page_hash))
    controller.commit(reservation)
    return reservation.pages


def is_right(lease: Lease) -> bool:
    """Whether every leased page of every pool holds what its key says."""
    return all(
        pool.host.page(slot).tobytes() == content(pool, entry.page_hash)
        for pool, slots in zip(lease.cache.pools, lease.slots, strict=True)
        for entry, slot in zip(lease.entries, slots, strict=True)
    )


def free_slots(controller: CacheController) -> list[int]:
    """Free slots of each pool."""
    return [pool.host.free_slots for pool in controller.cache.pools]
