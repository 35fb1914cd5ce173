"""Target and draft pools for tests, on the device and in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from hicache_storage.controller import CachePool
from hicache_storage.device_pool import DevicePool, LayeredPool
from hicache_storage.host_pool import HostPool, PageShape

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA"),
    ),
]
PAGE_TOKENS = 4
ORDERS = {
    "layer_first": ["layer", "token", "head", "dim"],
    "page_first": ["token", "layer", "head", "dim"],
    "page_first_direct": ["layer", "token", "head", "dim"],
    "page_head": ["head", "token", "layer", "dim"],
}
MHA = PageShape.mha(page_tokens=PAGE_TOKENS, layers=3, heads=2, head_dim=8, dtype="bfloat16")
DRAFT = PageShape.mha(page_tokens=PAGE_TOKENS, layers=1, heads=2, head_dim=8, dtype="bfloat16")
MLA = PageShape.mla(page_tokens=PAGE_TOKENS, layers=3, kv_dim=24, dtype="bfloat16")


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool of an engine: its host pool and its device tensors."""

    host: HostPool
    planes: list[list[torch.Tensor]]
    layered: LayeredPool

    def device_page(self, slot: int) -> list[torch.Tensor]:
        """Return a copy of each plane and layer of `slot` on the device."""
        tokens = slice(slot * PAGE_TOKENS, (slot + 1) * PAGE_TOKENS)
        return [tensor[tokens].cpu().clone() for plane in self.planes for tensor in plane]

    def host_page(self, slot: int) -> bytes:
        return self.host.page(slot).tobytes()

    def fill_host(self, slot: int, seed: int) -> None:
        """Fill a page of L2 with random bytes."""
        generator = torch.Generator().manual_seed(seed)
        nbytes = self.host.shape.nbytes
        self.host.page(slot).copy_from(
            torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
        )

    def fill_device(self, seed: int) -> None:
        """Fill all of L1 with random numbers."""
        generator = torch.Generator().manual_seed(seed)
        for plane in self.planes:
            for tensor in plane:
                bits = tensor.view(torch.uint8)
                bits.copy_(
                    torch.randint(0, 256, bits.shape, generator=generator, dtype=torch.uint8)
                )


def make_pool(
    shape: PageShape,
    device: str = "cpu",
    *,
    layout: str = "page_first",
    host_slots: int = 6,
    device_slots: int = 5,
    pin: bool | None = None,
) -> Pool:
    """Return a pool of zeros on both sides."""
    host = HostPool(shape, slots=host_slots, layout=layout, pin=pin)
    planes = _zeros(shape, device_slots, device)
    return Pool(host, planes, LayeredPool(host, planes))


def _zeros(shape: PageShape, slots: int, device: str) -> list[list[torch.Tensor]]:
    dtype = getattr(torch, shape.dtype)
    return [
        [
            torch.zeros((slots * shape.page_tokens, heads, dim), dtype=dtype, device=device)
            for _ in range(shape.layers)
        ]
        for heads, dim in shape.planes
    ]


class CacheDevice:
    """L1 of the pools of a cache."""

    def __init__(self, pools: Sequence[CachePool], device: str = "cpu", *, slots: int = 20) -> None:
        self.pools = pools
        self.planes = [_zeros(pool.host.shape, slots, device) for pool in pools]
        self.l1 = DevicePool(
            [
                LayeredPool(pool.host, planes)
                for pool, planes in zip(pools, self.planes, strict=True)
            ]
        )

    def page(self, pool: int, slot: int) -> list[torch.Tensor]:
        """Return each plane and layer of `slot`, as views of the device's memory."""
        page_tokens = self.pools[pool].host.shape.page_tokens
        tokens = slice(slot * page_tokens, (slot + 1) * page_tokens)
        return [tensor[tokens] for plane in self.planes[pool] for tensor in plane]

    def fill(self, pool: int, slot: int, data: bytes) -> None:
        """Write a page, given in the pool's stored order. The device may still copy after the return."""
        for target, source in zip(self.page(pool, slot), self._planes(pool, data), strict=True):
            target.copy_(source, non_blocking=True)

    def has(self, pool: int, slot: int, data: bytes) -> bool:
        """Return whether the device holds these bytes in `slot`. The device itself compares them."""
        page = self.page(pool, slot)
        return same(
            [plane.to(page[0].device) for plane in self._planes(pool, data)],
            page,
        )

    def _planes(self, pool: int, data: bytes) -> list[torch.Tensor]:
        host = self.pools[pool].host
        return page_planes(host.shape, host.layout, data)


def expected_page(pool: Pool, slot: int) -> list[torch.Tensor]:
    """Return the tensors that the device must hold for the page that is in `slot` of L2."""
    return page_planes(pool.host.shape, pool.host.layout, pool.host_page(slot))


def page_planes(shape: PageShape, layout: str, data: bytes) -> list[torch.Tensor]:
    """Return each plane and layer of a stored page, [tokens, heads, dim]."""
    numbers = torch.frombuffer(bytearray(data), dtype=getattr(torch, shape.dtype))
    found: list[torch.Tensor] = []
    start = 0
    for (heads, dim), nbytes in zip(shape.planes, shape.plane_nbytes, strict=True):
        end = start + nbytes // shape.itemsize
        sizes = {"layer": shape.layers, "token": shape.page_tokens, "head": heads, "dim": dim}
        order = ORDERS[layout]
        page = numbers[start:end].view([sizes[axis] for axis in order])
        found += page.permute([order.index(axis) for axis in sizes])
        start = end
    return found


def same(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Return whether all bits are equal. Values can't be compared, because random bits contain NaNs."""
    return len(first) == len(second) and all(
        torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        for one, other in zip(first, second, strict=True)
    )
