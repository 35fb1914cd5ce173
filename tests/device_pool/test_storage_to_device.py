"""Pages of target and draft from L3 to the device, and from the device to L3."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeAlias

import pytest
from device_groups import DEVICES, CacheDevice
from engines import PAGE_TOKENS, PROMPT, cache_pool, compute, content, engine_on
from hicache_backends.file import FileStorage
from hicache_backends.memory import MemoryStorage
from pages import hash_of

from hicache_storage.controller import CachePool
from hicache_storage.host_pool import PageShape
from hicache_storage.storage import HiCacheStorage

Opener: TypeAlias = Callable[[], AbstractContextManager[HiCacheStorage]]

TIMEOUT_S = 20
STEPS = [(0, layer) for layer in range(4)] + [(1, 0)]
NEW = [hash_of(number) for number in range(100, 116)]
"""Pages that only the device has at first."""


def pools_of_an_engine() -> list[CachePool]:
    """Return pools whose planes have 32 KiB, so large that each page takes a copy call of its own."""
    return [
        cache_pool(
            name,
            PageShape.mha(
                page_tokens=PAGE_TOKENS, layers=layers, heads=8, head_dim=128, dtype="bfloat16"
            ),
        )
        for name, layers in (("kv", 4), ("draft", 1))
    ]


@pytest.fixture(params=["file", "memory"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Return a function that opens L3: `file` anew each time, `memory` always the same."""
    if request.param == "file":
        return lambda: FileStorage.from_config({"path": str(tmp_path)})
    storage = MemoryStorage()
    return lambda: nullcontext(storage)


@pytest.mark.parametrize("device", DEVICES)
def test_the_device_has_the_bytes_of_l3(device: str, opener: Opener) -> None:
    with opener() as storage, engine_on(storage, pools_of_an_engine()) as engine:
        compute(engine, PROMPT)
        assert engine.drain(TIMEOUT_S)

    pools = pools_of_an_engine()
    on_device = CacheDevice(pools, device)
    with (
        opener() as storage,
        engine_on(storage, pools) as engine,
        on_device.l1 as l1,
        engine.prefetch("request", PROMPT).result() as lease,
    ):
        pinned = [pool.host.pinned for pool in pools]
        slots = l1.allocate(lease.pages) or []
        loading = l1.load(lease.slots, slots, indices=lease.indices)
        for pool, layer in STEPS:
            loading.wait(layer, pool=pool, timeout_s=TIMEOUT_S)
        found = [
            on_device.has(number, slot, content(pool, page_hash))
            for number, pool in enumerate(pools)
            for slot, page_hash in zip(slots, PROMPT, strict=True)
        ]
        loading.settled.result(TIMEOUT_S)

    assert [device == "cuda"] * 2 == pinned
    assert [True] * 2 * len(PROMPT) == found


@pytest.mark.parametrize("device", DEVICES)
def test_l3_has_the_bytes_of_the_device(device: str, opener: Opener) -> None:
    pools = pools_of_an_engine()
    on_device = CacheDevice(pools, device)
    with opener() as storage, engine_on(storage, pools) as engine, on_device.l1 as l1:
        slots = l1.allocate(len(NEW)) or []
        for number, pool in enumerate(pools):
            for slot, page_hash in zip(slots, NEW, strict=True):
                on_device.fill(number, slot, content(pool, page_hash))
        reservation = engine.reserve(NEW)
        storing = l1.store(slots, reservation.slots, indices=reservation.indices)
        storing.settled.result(TIMEOUT_S)
        engine.commit(reservation)
        assert engine.drain(TIMEOUT_S)

    pools = pools_of_an_engine()
    with (
        opener() as storage,
        engine_on(storage, pools) as engine,
        engine.prefetch("request", NEW).result() as lease,
    ):
        found = [
            pool.host.page(slot).tobytes() == content(pool, page_hash)
            for pool, taken in zip(pools, lease.slots, strict=True)
            for slot, page_hash in zip(taken, NEW, strict=True)
        ]

    assert [True] * 2 * len(NEW) == found
