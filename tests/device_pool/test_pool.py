"""Device pools: slots of all pools, and their transfers."""

from __future__ import annotations

import itertools
import random
import threading
import time
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from device_groups import (
    DEVICES,
    DRAFT,
    MHA,
    PAGE_TOKENS,
    CacheDevice,
    Pool,
    expected_page,
    make_pool,
    same,
)
from engines import PROMPT, cache_pools, compute, content, engine_on, optional_draft, windowed
from hicache_backends.memory import MemoryStorage

from hicache_storage.controller import PartialHits
from hicache_storage.device_pool import DevicePool, LayerCopier, LayerTransfer, LayerTransferFailed
from hicache_storage.device_pool.streams import CudaStream, HostStream
from hicache_storage.host_pool import PageShape

TIMEOUT_S = 20


@pytest.fixture
def target() -> Pool:
    return make_pool(MHA, device_slots=4)


@pytest.fixture
def draft() -> Pool:
    return make_pool(DRAFT, device_slots=5)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make loads on a CPU wait for an event, and return it."""
    go_on = threading.Event()
    original = HostStream.upload

    def held(*args: Any) -> None:
        assert go_on.wait(TIMEOUT_S)
        original(*args)

    monkeypatch.setattr(HostStream, "upload", held)
    return go_on


def settled(transfer: LayerTransfer) -> None:
    """Wait for the end of a transfer and of its callbacks."""
    done = threading.Event()

    def notify(_: Future[None]) -> None:
        done.set()

    transfer.settled.add_done_callback(notify)
    assert done.wait(TIMEOUT_S)


def test_there_are_as_many_slots_as_in_the_smallest_pool(target: Pool, draft: Pool) -> None:
    with DevicePool([target.layered, draft.layered]) as pool:
        assert (4, 4) == (pool.slots, pool.free_slots)
        assert [0, 1, 2, 3] == pool.allocate(4)
        assert pool.allocate(1) is None


@pytest.mark.parametrize("device", DEVICES)
def test_pages_go_to_l1_and_back_in_both_pools(device: str) -> None:
    target, draft = make_pool(MHA, device), make_pool(DRAFT, device)
    for slot in (0, 1):
        target.fill_host(slot, seed=slot)
        draft.fill_host(slot, seed=10 + slot)

    with DevicePool([target.layered, draft.layered]) as pool:
        slots = pool.allocate(2)
        assert slots
        pool.load([[0, 1], [1, 0]], slots).settled.result(TIMEOUT_S)
        pool.store(slots, [[4, 5], [5, 4]]).settled.result(TIMEOUT_S)

    assert same(expected_page(draft, 1), draft.device_page(slots[0]))
    assert [target.host_page(0), target.host_page(1)] == [target.host_page(4), target.host_page(5)]
    assert [draft.host_page(0), draft.host_page(1)] == [draft.host_page(4), draft.host_page(5)]


@pytest.mark.parametrize("direction", ["load", "store"])
def test_unallocated_slots_are_refused(target: Pool, direction: str) -> None:
    with DevicePool([target.layered]) as pool:
        (slot,) = pool.allocate(1) or []
        for unused in (slot + 1, 99, -1):
            with pytest.raises(ValueError, match="is not in use"):
                pool.load([[0]], [unused]) if direction == "load" else pool.store([unused], [[0]])
        pool.free([slot])
        with pytest.raises(ValueError, match="is not in use"):
            pool.load([[0]], [slot]) if direction == "load" else pool.store([slot], [[0]])


def test_a_slot_freed_in_the_middle_of_a_load_is_free_when_it_has_settled(
    target: Pool, gate: threading.Event
) -> None:
    with DevicePool([target.layered]) as pool:
        slots = pool.allocate(2) or []
        transfer = pool.load([[0, 1]], slots)
        pool.free(slots)
        during = pool.free_slots
        gate.set()
        settled(transfer)

        assert (2, 4) == (during, pool.free_slots)


def test_a_slot_freed_during_a_transfer_cannot_be_used_or_freed_again(
    target: Pool, gate: threading.Event
) -> None:
    with DevicePool([target.layered]) as pool:
        slots = pool.allocate(1) or []
        transfer = pool.load([[0]], slots)
        pool.free(slots)
        with pytest.raises(ValueError, match="is not in use"):
            pool.free(slots)
        with pytest.raises(ValueError, match="is not in use"):
            pool.load([[0]], slots)
        gate.set()
        settled(transfer)

        assert 4 == pool.free_slots


def test_a_slot_is_kept_until_the_last_of_its_transfers_has_settled(
    target: Pool, gate: threading.Event
) -> None:
    with DevicePool([target.layered]) as pool:
        slots = pool.allocate(1) or []
        loading, storing = pool.load([[0]], slots), pool.store(slots, [[1]])
        pool.free(slots)
        settled(storing)
        during = pool.free_slots
        gate.set()
        settled(loading)

        assert (3, 4) == (during, pool.free_slots)


def test_a_failed_transfer_releases_its_slots(
    target: Pool, draft: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(HostStream, "upload", fail)
    with DevicePool([target.layered, draft.layered]) as pool:
        slots = pool.allocate(2) or []
        transfer = pool.load([[0, 1], [0, 1]], slots)
        settled(transfer)
        with pytest.raises(LayerTransferFailed):
            transfer.wait(0, pool=1)
        pool.free(slots)

        assert 4 == pool.free_slots


@pytest.mark.parametrize("freed", [[0, 0], [0, 3], [0, 99]])
def test_freeing_an_unused_slot_is_refused_and_frees_nothing(
    target: Pool, freed: list[int]
) -> None:
    with DevicePool([target.layered]) as pool:
        pool.allocate(2)
        with pytest.raises(ValueError, match=r"is not in use|freed twice"):
            pool.free(freed)

        assert 2 == pool.free_slots


def test_a_refused_load_holds_no_slot(target: Pool) -> None:
    with DevicePool([target.layered]) as pool:
        slots = pool.allocate(1) or []
        with pytest.raises(ValueError, match="no host slot 99"):
            pool.load([[99]], slots)
        pool.free(slots)

        assert 4 == pool.free_slots


def test_a_closed_pool_moves_nothing(target: Pool) -> None:
    pool = DevicePool([target.layered])
    slots = pool.allocate(1) or []
    assert pool.close()
    assert pool.close()

    with pytest.raises(RuntimeError, match="were closed"):
        pool.load([[0]], slots)


@pytest.mark.parametrize("device", DEVICES)
def test_concurrent_requests_see_their_own_pages_and_leak_no_slot(device: str) -> None:
    """Many threads share few slots. Some cancel in the middle of a load."""
    target, draft = make_pool(MHA, device, device_slots=4), make_pool(DRAFT, device)
    for slot in range(6):
        target.fill_host(slot, seed=slot)
        draft.fill_host(slot, seed=10 + slot)
    wrong: list[int] = []

    def serve(pool: DevicePool, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(40):
            count = chance.randint(1, 2)
            while (slots := pool.allocate(count)) is None:
                time.sleep(0)
            pages = chance.sample(range(6), count)
            transfer = pool.load([pages, pages], slots)
            if chance.random() < 0.3:
                transfer.cancel()
            else:
                transfer.wait(0, pool=1, timeout_s=TIMEOUT_S)
                wrong.extend(
                    page
                    for page, slot in zip(pages, slots, strict=True)
                    if not same(expected_page(target, page), target.device_page(slot))
                    or not same(expected_page(draft, page), draft.device_page(slot))
                )
            pool.free(slots)

    with DevicePool([target.layered, draft.layered]) as pool:
        threads = [threading.Thread(target=serve, args=(pool, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S * 4)
        settled(pool.load([[], []], []))  # it runs after all others

        assert not wrong
        assert 4 == pool.free_slots


# Kernels on L1 while copies run: each kernel waits for the copy of its own layer only.

LAYERS = 6
PLANES = 2
TARGET = PageShape.mha(
    page_tokens=PAGE_TOKENS, layers=LAYERS, heads=2, head_dim=1024, dtype="bfloat16"
)
STEPS = [*((0, layer) for layer in range(LAYERS)), (1, 0)]
"""Pool and layer of each step of a transfer."""
STREAMS: dict[str, Any] = {"cpu": HostStream, "cuda": CudaStream}


def on_stream(device: str) -> AbstractContextManager[Any]:
    """Run kernels on a stream of their own, as an engine does. A CPU has no streams."""
    if device == "cpu":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


def finish_kernels(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def pause_stream(device: str) -> None:
    """Let the current CUDA stream idle for about 10 ms before its next work. On a CPU, do nothing."""
    if device == "cuda":
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
    else:
        time.sleep(0.01)


def target_and_draft(device: str) -> list[Pool]:
    """Return pools with a page in slot 0 of L2, and zeros in L1."""
    pools = [make_pool(shape, device) for shape in (TARGET, DRAFT)]
    for seed, pool in enumerate(pools):
        pool.fill_host(0, seed=seed)
    finish_kernels(device)
    return pools


def read_layer(pool: Pool, layer: int, slot: int) -> list[torch.Tensor]:
    """Start kernels that copy a layer of `slot` to other device memory."""
    tokens = slice(slot * PAGE_TOKENS, (slot + 1) * PAGE_TOKENS)
    return [plane[layer][tokens].clone() for plane in pool.planes]


def is_right(pools: list[Pool], seen: list[list[torch.Tensor]]) -> list[bool]:
    """Return for each step whether its kernels read the page that L2 has in slot 0."""
    return [
        same(expected_page(pools[pool], 0)[layer :: pools[pool].host.shape.layers], found)
        for (pool, layer), found in zip(
            STEPS, [[plane.cpu() for plane in planes] for planes in seen], strict=True
        )
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_a_kernel_reads_its_layer_before_the_next_one_is_copied(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy of the next layer begins until the kernels of this one have ended."""
    pools = target_and_draft(device)
    read = [threading.Event() for _ in STEPS]
    numbers = itertools.count()
    upload: Any = STREAMS[device].upload

    def held(*arguments: Any) -> None:
        step = next(numbers) // PLANES
        assert not step or read[step - 1].wait(TIMEOUT_S)
        upload(*arguments)

    monkeypatch.setattr(STREAMS[device], "upload", held)
    seen: list[list[torch.Tensor]] = []

    with LayerCopier([pool.layered for pool in pools]) as copier, on_stream(device):
        transfer = copier.load([[0], [0]], [1])
        for (pool, layer), end in zip(STEPS, read, strict=True):
            transfer.wait(layer, pool=pool, timeout_s=TIMEOUT_S)
            seen.append(read_layer(pools[pool], layer, 1))
            finish_kernels(device)
            end.set()
        transfer.settled.result(TIMEOUT_S)

    assert [True] * len(STEPS) == is_right(pools, seen)


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_in_the_queue_wait_for_the_copies_of_their_layers(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kernels are queued before the copies, which are late. Without events they would read zeros."""
    pools = target_and_draft(device)
    upload: Any = STREAMS[device].upload

    def late(stream: Any, *arguments: Any) -> None:
        with torch.cuda.stream(stream._stream) if device == "cuda" else nullcontext():
            pause_stream(device)
        upload(stream, *arguments)

    monkeypatch.setattr(STREAMS[device], "upload", late)
    seen: list[list[torch.Tensor]] = []

    with LayerCopier([pool.layered for pool in pools]) as copier, on_stream(device):
        transfer = copier.load([[0], [0]], [1])
        for pool, layer in STEPS:
            transfer.wait(layer, pool=pool, timeout_s=TIMEOUT_S)
            seen.append(read_layer(pools[pool], layer, 1))
        transfer.settled.result(TIMEOUT_S)
        finish_kernels(device)

    assert [True] * len(STEPS) == is_right(pools, seen)


@pytest.mark.parametrize("device", DEVICES)
def test_a_store_has_what_kernels_in_the_queue_write(device: str) -> None:
    pool, _ = target_and_draft(device)

    with LayerCopier([pool.layered]) as copier, on_stream(device):
        pause_stream(device)
        for number, tensor in enumerate(itertools.chain(*pool.planes), start=1):
            tensor.fill_(number)
        copier.store([1], [[3]]).settled.result(TIMEOUT_S)

    stored = expected_page(pool, 3)
    assert list(range(1, PLANES * LAYERS + 1)) == [int(plane.max()) for plane in stored]
    assert same(stored, pool.device_page(1))


@pytest.mark.parametrize("device", DEVICES)
def test_a_load_overwrites_nothing_that_kernels_in_the_queue_read(device: str) -> None:
    pool, _ = target_and_draft(device)
    pool.fill_device(seed=3)
    before = pool.device_page(1)

    with LayerCopier([pool.layered]) as copier, on_stream(device):
        pause_stream(device)
        seen = [read_layer(pool, layer, 1) for layer in range(LAYERS)]
        copier.load([[0]], [1]).settled.result(TIMEOUT_S)

    read = [planes[number].cpu() for number in range(PLANES) for planes in seen]
    assert same(before, read)
    assert same(expected_page(pool, 0), pool.device_page(1))


# Transfers of a real controller's pages to L1 and back.


def moved(transfer: LayerTransfer) -> None:
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
            moved(l1.store(l1.allocate(4) or [], reservation.slots, indices=reservation.indices))
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
        moved(l1.load(lease.slots, slots, indices=lease.indices))
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
        moved(l1.load(lease.slots, slots, indices=lease.indices))

    last = len(PROMPT) - 1
    assert on_device.has(2, slots[last], content(pools[2], PROMPT[last]))
    assert not any(plane.any() for plane in on_device.page(2, slots[0]))
