"""Kernels on L1 while copies are under way: each kernel waits for its layer, and for no other one."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from device_groups import DEVICES, DRAFT, PAGE_TOKENS, expected_page, make_pool, same

from hicache_storage.device_pool import LayerCopier
from hicache_storage.device_pool.streams import CudaStream, HostStream
from hicache_storage.host_pool import PageShape

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from device_groups import Pool

TIMEOUT_S = 20
LAYERS = 6
PLANES = 2
TARGET = PageShape.mha(
    page_tokens=PAGE_TOKENS, layers=LAYERS, heads=2, head_dim=1024, dtype="bfloat16"
)
STEPS = [*((0, layer) for layer in range(LAYERS)), (1, 0)]
"""Pool and layer of each step of a transfer."""
STREAMS: dict[str, Any] = {"cpu": HostStream, "cuda": CudaStream}


def on_stream(device: str) -> AbstractContextManager[Any]:
    """Run kernels on a stream of their own, as an engine does. A CPU has none."""
    if device == "cpu":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


def finish_kernels(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def pause_stream(device: str) -> None:
    """Let the current stream idle for about 10 ms before its next work. A CPU idles at once."""
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
    """All kernels are queued while the copies are late. Without its event a kernel would read zeros."""
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
