"""Transfers of a real controller's pages to L1 and back."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from device_groups import DEVICES, CacheDevice
from engines import PROMPT, cache_pools, compute, content, engine_on, optional_draft, windowed
from hicache_backends.memory import MemoryStorage

from hicache_storage.controller import PartialHits
from hicache_storage.device_pool import LayerTransferFailed
from hicache_storage.device_pool.streams import HostStream

if TYPE_CHECKING:
    from hicache_storage.device_pool import LayerTransfer

TIMEOUT_S = 20


def settled(transfer: LayerTransfer) -> None:
    transfer.settled.result(TIMEOUT_S)


def test_pages_in_transfer_to_l1_are_not_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()
    original: Any = HostStream.upload

    def held(*args: Any) -> None:
        assert go_on.wait(TIMEOUT_S)
        original(*args)

    monkeypatch.setattr(HostStream, "upload", held)
    pools = cache_pools(slots=16)
    device = CacheDevice(pools)
    with engine_on(MemoryStorage(), pools) as engine, device.l1 as l1:
        compute(engine, PROMPT[:12])
        engine.drain(TIMEOUT_S)
        lease = engine.prefetch("request", PROMPT[:12]).result()
        released = threading.Event()
        loading = l1.load(lease.slots, l1.allocate(lease.pages) or [], indices=lease.indices)
        loading.settled.add_done_callback(lambda _: lease.release())
        loading.settled.add_done_callback(lambda _: released.set())

        during = engine.reserve(PROMPT)
        during.abandon()
        go_on.set()
        assert released.wait(TIMEOUT_S)
        after = engine.reserve(PROMPT)
        after.abandon()

    assert (4, 16) == (during.pages, after.pages)


def test_a_failed_store_makes_no_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(HostStream, "download", fail)
    pools = cache_pools()
    device = CacheDevice(pools)
    with engine_on(MemoryStorage(), pools) as engine, device.l1 as l1:
        reservation = engine.reserve(PROMPT[:4])
        with pytest.raises(LayerTransferFailed):
            settled(l1.store(l1.allocate(4) or [], reservation.slots, indices=reservation.indices))
        reservation.abandon()

        assert [32, 32] == [pool.host.free_slots for pool in pools]
        assert 0 == engine.prefetch("request", PROMPT[:4]).result().pages


@pytest.mark.parametrize("device", DEVICES)
def test_a_draft_that_is_missing_in_l3_leaves_its_slots_in_l1_unchanged(device: str) -> None:
    storage = MemoryStorage()
    with engine_on(storage, cache_pools()[:1]) as engine:
        compute(engine, PROMPT)
        engine.drain(TIMEOUT_S)

    pools = optional_draft()
    on_device = CacheDevice(pools, device)
    with (
        engine_on(storage, pools, partial_hits=PartialHits.TAKE_TARGET) as engine,
        on_device.l1 as l1,
        engine.prefetch("request", PROMPT).result() as lease,
    ):
        slots = l1.allocate(lease.pages) or []
        settled(l1.load(lease.slots, slots, indices=lease.indices))
        missing = lease.missing("draft")

    assert list(range(len(PROMPT))) == missing
    assert on_device.has(0, slots[3], content(pools[0], PROMPT[3]))
    assert not any(plane.any() for plane in on_device.page(1, slots[3]))


@pytest.mark.parametrize("device", DEVICES)
def test_a_window_is_loaded_for_the_pages_that_it_covers(device: str) -> None:
    storage = MemoryStorage()
    with engine_on(storage, windowed()) as engine:
        compute(engine, PROMPT)
        engine.drain(TIMEOUT_S)

    pools = windowed()
    on_device = CacheDevice(pools, device)
    with (
        engine_on(storage, pools) as engine,
        on_device.l1 as l1,
        engine.prefetch("request", PROMPT).result() as lease,
    ):
        slots = l1.allocate(lease.pages) or []
        settled(l1.load(lease.slots, slots, indices=lease.indices))

    last = len(PROMPT) - 1
    assert on_device.has(2, slots[last], content(pools[2], PROMPT[last]))
    assert not any(plane.any() for plane in on_device.page(2, slots[0]))
