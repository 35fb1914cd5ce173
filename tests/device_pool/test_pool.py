"""Device pools: slots of all pools, and their transfers."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from device_groups import DEVICES, DRAFT, MHA, expected_page, make_pool, same

from hicache_storage.device_pool import DevicePool, LayerTransferFailed
from hicache_storage.device_pool.streams import HostStream

if TYPE_CHECKING:
    from concurrent.futures import Future

    from device_groups import Pool

    from hicache_storage.device_pool import LayerTransfer

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
