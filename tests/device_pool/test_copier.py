"""Copies of pages between L1 and L2, layer by layer."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from device_groups import DEVICES, DRAFT, MHA, MLA, PAGE_TOKENS, expected_page, make_pool, same

from hicache_storage.backend_support.executor import DaemonExecutor
from hicache_storage.device_pool import LayerCopier, LayerTransferFailed
from hicache_storage.device_pool.copier import LAYERS_AHEAD
from hicache_storage.device_pool.streams import HostStream
from hicache_storage.host_pool import LAYOUTS, PageShape

TIMEOUT_S = 20
UNEQUAL = PageShape.mha(
    page_tokens=PAGE_TOKENS, layers=2, heads=2, head_dim=6, v_head_dim=4, dtype="float16"
)
LARGE = PageShape.mha(page_tokens=PAGE_TOKENS, layers=2, heads=2, head_dim=1024, dtype="bfloat16")
SHAPES = {
    "large": (LARGE, LAYOUTS),
    "mha": (MHA, LAYOUTS),
    "mla": (MLA, LAYOUTS[:3]),
    "unequal": (UNEQUAL, LAYOUTS[1:3]),
}
CASES = [
    pytest.param(shape, layout, id=f"{name}-{layout}")
    for name, (shape, layouts) in SHAPES.items()
    for layout in layouts
]


def hook(
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[int], object],
    names: Sequence[str] = ("upload", "download"),
) -> None:
    """Call `before` with a running number before each copy of a plane on a CPU."""
    numbers = itertools.count()
    for name in names:
        original: Any = getattr(HostStream, name)

        def hooked(*args: Any, _original: Any = original, **more: Any) -> Any:
            before(next(numbers))
            return _original(*args, **more)

        monkeypatch.setattr(HostStream, name, hooked)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_a_load_copies_every_layer_by_the_layout(
    shape: PageShape, layout: str, device: str
) -> None:
    pool = make_pool(shape, device, layout=layout)
    for slot in range(6):
        pool.fill_host(slot, seed=slot)

    with LayerCopier([pool.layered]) as copier:
        copier.load([[5, 0, 3]], [2, 4, 1]).settled.result(TIMEOUT_S)

    for host_slot, device_slot in ((5, 2), (0, 4), (3, 1)):
        assert same(expected_page(pool, host_slot), pool.device_page(device_slot))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_a_load_writes_nothing_else(shape: PageShape, layout: str, device: str) -> None:
    pool = make_pool(shape, device, layout=layout)
    pool.fill_device(seed=1)
    pool.fill_host(0, seed=2)
    before = {slot: pool.device_page(slot) for slot in (0, 1, 3, 4)}

    with LayerCopier([pool.layered]) as copier:
        copier.load([[0]], [2]).settled.result(TIMEOUT_S)

    assert all(same(page, pool.device_page(slot)) for slot, page in before.items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_a_store_is_the_inverse_of_a_load(shape: PageShape, layout: str, device: str) -> None:
    pool = make_pool(shape, device, layout=layout)
    pool.fill_device(seed=3)
    pool.fill_host(4, seed=4)
    untouched = pool.host_page(4)

    with LayerCopier([pool.layered]) as copier:
        copier.store([1, 4], [[5, 2]]).settled.result(TIMEOUT_S)

    assert same(expected_page(pool, 5), pool.device_page(1))
    assert same(expected_page(pool, 2), pool.device_page(4))
    assert untouched == pool.host_page(4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
)
def test_every_dtype_is_moved_bit_by_bit(dtype: str, device: str) -> None:
    shape = PageShape.mha(page_tokens=PAGE_TOKENS, layers=2, heads=2, head_dim=8, dtype=dtype)
    pool = make_pool(shape, device)
    pool.fill_host(0, seed=5)

    with LayerCopier([pool.layered]) as copier:
        copier.load([[0]], [1]).settled.result(TIMEOUT_S)
        copier.store([1], [[3]]).settled.result(TIMEOUT_S)

    assert same(expected_page(pool, 0), pool.device_page(1))
    assert pool.host_page(0) == pool.host_page(3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_host_pool_that_is_not_pinned_has_the_same_copies(device: str) -> None:
    pool = make_pool(MHA, device, pin=False)
    pool.fill_host(0, seed=17)

    with LayerCopier([pool.layered]) as copier:
        copier.load([[0]], [1]).settled.result(TIMEOUT_S)
        copier.store([1], [[3]]).settled.result(TIMEOUT_S)

    assert same(expected_page(pool, 0), pool.device_page(1))
    assert pool.host_page(0) == pool.host_page(3)


@pytest.mark.parametrize("device", DEVICES)
def test_target_and_draft_move_in_one_transfer(device: str) -> None:
    target, draft = make_pool(MHA, device), make_pool(DRAFT, device)
    target.fill_host(3, seed=6)
    draft.fill_host(1, seed=7)

    with LayerCopier([target.layered, draft.layered]) as copier:
        copier.load([[3], [1]], [2]).settled.result(TIMEOUT_S)

    assert same(expected_page(target, 3), target.device_page(2))
    assert same(expected_page(draft, 1), draft.device_page(2))


@pytest.mark.parametrize("device", DEVICES)
def test_a_pool_without_a_page_keeps_the_bytes_of_its_slot(device: str) -> None:
    target, draft = make_pool(MHA, device), make_pool(DRAFT, device)
    draft.fill_device(seed=8)
    target.fill_host(0, seed=9)
    target.fill_host(1, seed=10)
    draft.fill_host(5, seed=11)
    before = draft.device_page(2)

    with LayerCopier([target.layered, draft.layered]) as copier:
        copier.load([[0, 1], [5]], [2, 3], indices=[[0, 1], [1]]).settled.result(TIMEOUT_S)

    assert same(expected_page(target, 0), target.device_page(2))
    assert same(before, draft.device_page(2))
    assert same(expected_page(draft, 5), draft.device_page(3))


@pytest.mark.parametrize("device", DEVICES)
def test_a_pool_without_any_page_releases_its_waiters(device: str) -> None:
    target, draft = make_pool(MHA, device), make_pool(DRAFT, device)

    with LayerCopier([target.layered, draft.layered]) as copier:
        for transfer in (
            copier.load([[0], []], [2], indices=[[0], []]),
            copier.store([2], [[1], []], indices=[[0], []]),
        ):
            transfer.wait(0, pool=1, timeout_s=TIMEOUT_S)
            transfer.settled.result(TIMEOUT_S)


def test_a_layer_can_be_used_during_the_copy_of_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, draft = make_pool(MHA), make_pool(DRAFT)
    target.fill_host(0, seed=12)
    go_on = threading.Event()
    planes_of_layer_0 = 2
    hook(monkeypatch, lambda number: number < planes_of_layer_0 or go_on.wait(TIMEOUT_S))

    with LayerCopier([target.layered, draft.layered]) as copier:
        transfer = copier.load([[0], [0]], [1])
        transfer.wait(0, timeout_s=TIMEOUT_S)
        first, *others = target.device_page(1)[:3]
        arrived = same([expected_page(target, 0)[0]], [first])
        with pytest.raises(TimeoutError, match="layer 1 of pool 0"):
            transfer.wait(1, timeout_s=0.01)
        go_on.set()
        transfer.wait(0, pool=1, timeout_s=math.inf)

    assert arrived
    assert not any(layer.any() for layer in others)
    assert same(expected_page(target, 0), target.device_page(1))


def test_loads_and_stores_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(MHA)
    go_on = threading.Event()
    hook(monkeypatch, lambda _: go_on.wait(TIMEOUT_S), ["upload"])

    with LayerCopier([pool.layered]) as copier:
        loading = copier.load([[0]], [0])
        copier.store([1], [[1]]).settled.result(TIMEOUT_S)
        assert not loading.settled.done()
        go_on.set()
        loading.settled.result(TIMEOUT_S)


@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("failing", range(8))
def test_a_failure_releases_every_waiting_thread(
    failing: int, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy fails at each plane of each layer of both pools in turn."""
    target, draft = make_pool(MHA), make_pool(DRAFT)
    waiting = threading.Barrier(5)

    def fail(number: int) -> None:
        if number == 0:
            waiting.wait(TIMEOUT_S)
        if number == failing:
            raise OSError("no such device")

    hook(monkeypatch, fail)
    ends: dict[tuple[int, int], BaseException | None] = {}

    with LayerCopier([target.layered, draft.layered]) as copier:
        transfer = (
            copier.load([[0], [0]], [1]) if direction == "load" else copier.store([1], [[0], [0]])
        )

        def wait(pool: int, layer: int) -> None:
            waiting.wait(TIMEOUT_S)
            try:
                transfer.wait(layer, pool=pool, timeout_s=TIMEOUT_S)
            except LayerTransferFailed as error:
                ends[pool, layer] = error
            else:
                ends[pool, layer] = None

        steps = [(0, 0), (0, 1), (0, 2), (1, 0)]
        threads = [threading.Thread(target=wait, args=step) for step in steps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        with pytest.raises(LayerTransferFailed, match="no such device") as failure:
            transfer.settled.result(TIMEOUT_S)

    assert isinstance(failure.value.__cause__, OSError)
    behind = 0 if direction == "load" else LAYERS_AHEAD
    arrived = max(0, failing // 2 - behind)
    assert [None] * arrived == [ends[step] for step in steps[:arrived]]
    assert all(isinstance(ends[step], LayerTransferFailed) for step in steps[arrived:])


class _Lost:
    """An event of a device that has failed, so it never happens."""

    def block_caller_stream(self) -> None:
        """Do nothing: no test calls it."""

    def synchronize(self) -> None:
        raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_lost_device_fails_the_transfer(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device can fail late, after all copies were queued without an error."""
    pool = make_pool(MHA)

    def lost(_: HostStream) -> _Lost:
        return _Lost()

    monkeypatch.setattr(HostStream, "record_event", lost)

    with LayerCopier([pool.layered]) as copier:
        transfer = copier.load([[0]], [1]) if direction == "load" else copier.store([1], [[0]])
        with pytest.raises(LayerTransferFailed, match="the device is lost: an illegal memory"):
            transfer.settled.result(TIMEOUT_S)


def test_a_thread_survives_a_failed_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(MHA)
    pool.fill_host(0, seed=13)

    def fail(number: int) -> None:
        if not number:
            raise SystemExit(3)

    hook(monkeypatch, fail)
    with LayerCopier([pool.layered]) as copier:
        with pytest.raises(LayerTransferFailed):
            copier.load([[0]], [0]).settled.result(TIMEOUT_S)
        copier.load([[0]], [1]).settled.result(TIMEOUT_S)

    assert same(expected_page(pool, 0), pool.device_page(1))


def test_a_cancelled_transfer_moves_no_further_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(MHA)
    for slot in (0, 1):
        pool.fill_host(slot, seed=slot)
    begun, go_on = threading.Event(), threading.Event()

    def pause(number: int) -> None:
        if number == 2:
            begun.set()
            go_on.wait(TIMEOUT_S)

    hook(monkeypatch, pause)
    with LayerCopier([pool.layered]) as copier:
        transfer = copier.load([[0]], [1])
        assert begun.wait(TIMEOUT_S)
        transfer.cancel()
        with pytest.raises(LayerTransferFailed, match="canceled"):
            transfer.wait(2, timeout_s=TIMEOUT_S)
        assert not transfer.settled.done()
        go_on.set()
        with pytest.raises(LayerTransferFailed, match="canceled"):
            transfer.settled.result(TIMEOUT_S)

    assert not pool.device_page(1)[2].any()


def test_a_transfer_that_waits_for_another_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = make_pool(MHA)
    pool.fill_host(0, seed=14)
    go_on = threading.Event()
    hook(monkeypatch, lambda _: go_on.wait(TIMEOUT_S))

    with LayerCopier([pool.layered]) as copier:
        first, second = copier.load([[0]], [0]), copier.load([[0]], [1])
        second.cancel()
        go_on.set()
        first.settled.result(TIMEOUT_S)
        with pytest.raises(LayerTransferFailed):
            second.settled.result(TIMEOUT_S)

    assert not any(layer.any() for layer in pool.device_page(1))


def test_close_finishes_started_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(MHA)
    go_on = threading.Event()
    hook(monkeypatch, lambda _: go_on.wait(TIMEOUT_S))
    copier = LayerCopier([pool.layered])
    transfers = [copier.load([[0]], [0]), copier.load([[1]], [1])]

    assert not copier.close(timeout_s=0.01)
    go_on.set()
    for transfer in transfers:
        transfer.settled.result(TIMEOUT_S)
    assert copier.close(TIMEOUT_S)

    with pytest.raises(RuntimeError, match="were closed"):
        copier.load([[0]], [0])


def test_close_has_one_timeout_for_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(MHA)
    go_on = threading.Event()
    hook(monkeypatch, lambda _: go_on.wait(TIMEOUT_S))
    copier = LayerCopier([pool.layered])
    copier.load([[0]], [0])
    given: list[float] = []
    close = DaemonExecutor.close

    def noted(workers: DaemonExecutor, timeout_s: float) -> bool:
        given.append(timeout_s)
        return close(workers, timeout_s)

    monkeypatch.setattr(DaemonExecutor, "close", noted)
    assert not copier.close(timeout_s=0.1)
    go_on.set()
    assert copier.close(TIMEOUT_S)

    assert given[1] == 0


def test_closing_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    copier = LayerCopier([make_pool(MHA).layered])
    copier.close()

    assert not set(threading.enumerate()) - before


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["load", "store"])
def test_invalid_slots_are_refused_before_any_copy(direction: str) -> None:
    """test_slot_mapping.py has all refused slots."""
    target, draft = make_pool(MHA), make_pool(DRAFT)

    with LayerCopier([target.layered, draft.layered]) as copier:
        if direction == "load":
            with pytest.raises(ValueError, match="no host slot 6"):
                copier.load([[0], [6]], [0])
        else:
            with pytest.raises(ValueError, match="no host slot 6"):
                copier.store([0], [[0], [6]])


def test_pools_that_differ_in_device_or_page_size_are_refused() -> None:
    other = PageShape.mha(page_tokens=2, layers=1, heads=2, head_dim=8, dtype="bfloat16")

    with pytest.raises(ValueError, match="at least one pool"):
        LayerCopier([])
    with pytest.raises(ValueError, match="the same page_tokens"):
        LayerCopier([make_pool(MHA).layered, make_pool(other).layered])
