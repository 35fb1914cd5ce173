"""Pages of a target and a draft in L1 and L2, for benchmarks of copies between the two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hicache_storage.device_pool import LayeredPool
from hicache_storage.host_pool import HostPool, PageShape

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE_TOKENS, HEADS, HEAD_DIM = 64, 8, 128
LAYERS = {"kv": 32, "draft": 1}


class Workload:
    """Pages of a target and a draft, scattered over L1 and L2."""

    def __init__(self, layout: str, pages: int, device: torch.device) -> None:
        self.device = device
        self.pages = pages
        self.hosts = [
            HostPool(
                PageShape.mha(
                    page_tokens=PAGE_TOKENS,
                    layers=layers,
                    heads=HEADS,
                    head_dim=HEAD_DIM,
                    dtype="bfloat16",
                ),
                slots=2 * pages,
                layout=layout,
            )
            for layers in LAYERS.values()
        ]
        rows = (2 * pages * PAGE_TOKENS, HEADS, HEAD_DIM)
        self.pools = [
            LayeredPool(
                host,
                [
                    [
                        torch.zeros(rows, dtype=torch.bfloat16, device=device)
                        for _ in range(host.shape.layers)
                    ]
                    for _ in host.shape.planes
                ],
            )
            for host in self.hosts
        ]
        scattered = torch.Generator().manual_seed(1)
        order = [torch.randperm(2 * pages, generator=scattered)[:pages] for _ in range(3)]
        self.device_slots = [int(slot) for slot in order[0]]
        self.host_slots = [[int(slot) for slot in slots] for slots in order[1:]]

    @property
    def name(self) -> str:
        """The device, layout, number of pages and kind of host memory."""
        host = self.hosts[0]
        pinned = "pinned" if host.pinned else "not pinned"
        return f"{self.device.type}, {host.layout}, {self.pages} pages, {pinned}"

    @property
    def nbytes(self) -> int:
        return self.pages * sum(host.shape.nbytes for host in self.hosts)

    def layers(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[int]]]:
        """Yield for each plane of each layer: its device pages, its pages in L2, and the slots in L2."""
        for pool, slots in zip(self.pools, self.host_slots, strict=True):
            for layer in range(pool.layers):
                for on_device, in_host in pool.planes(layer):
                    yield on_device, in_host, slots

    def fill(self, turn: int, *, hosts: bool) -> None:
        """Fill the source side with new numbers, and the other side with different numbers."""
        generator = torch.Generator().manual_seed(turn)
        for on_device, in_host, _ in self.layers():
            source, target = (in_host, on_device) if hosts else (on_device, in_host)
            target.fill_(-1)
            source.copy_(torch.randint(1, 1 << 15, source.shape[1:], generator=generator))
            source[:, 0, 0, 0] = torch.arange(len(source))  # no two pages are equal
        self.finish()

    def is_same(self) -> bool:
        """Return True if the device has the contents of L2."""
        return all(
            torch.equal(on_device[self.device_slots].cpu(), in_host[slots])
            for on_device, in_host, slots in self.layers()
        )

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
