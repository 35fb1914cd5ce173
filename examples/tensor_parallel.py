"""Store a prompt from two tensor-parallel ranks, and find it from one rank.

Both engines cut their pages into groups of two KV heads, so one rank can read what two
ranks wrote.
The draft's latent (MLA) is the same on both ranks, so only one of them writes it.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from hicache_storage import KeySpace, open_storage, page_hashes
from hicache_storage.controller import (
    CacheController,
    CachePool,
    ControllerSettings,
    PrefetchPolicy,
    Ranks,
    SingleRank,
    TorchRanks,
)
from hicache_storage.host_pool import HostPool, PageShape
from hicache_storage.page_store import PageStore
from hicache_storage.topology import Extent, Grid, Part, Topology

PAGE_TOKENS = 64
# In the layout page_head, each group of heads is one segment.
LAYOUT = {"kv": "page_head", "draft": "page_first_direct"}
MODEL = {"kv": Extent(layers=4, heads=4), "draft": Extent(layers=1)}
GRID = {"kv": Grid(head_group=2), "draft": Grid()}
PROMPT = list(range(1000, 1000 + 20 * PAGE_TOKENS))


def shape_of(part: Part) -> PageShape:
    """Return a rank's page shape: its heads, or the latent that all ranks share."""
    if part.heads is None:
        return PageShape.mla(
            page_tokens=PAGE_TOKENS, layers=part.layers, kv_dim=32, dtype="float16"
        )
    return PageShape.mha(
        page_tokens=PAGE_TOKENS,
        layers=part.layers,
        heads=part.heads,
        head_dim=16,
        dtype="float16",
    )


def cache_pool(name: str, topology: Topology, rank: int) -> CachePool:
    """Return a rank's part of a pool, cut into tiles for the storage."""
    part = topology.part(MODEL[name], rank)
    assert (
        part is not None
    )  # without pipeline stages every rank has a part of every pool
    shape = shape_of(part)
    host = HostPool(
        shape,
        slots=64,
        layout=LAYOUT[name],
        tiles=topology.tiles(MODEL[name], rank, GRID[name]),
    )
    space = KeySpace(
        model="example/tiny-llama",
        dtype=shape.dtype,
        layout=LAYOUT[name],
        page_tokens=PAGE_TOKENS,
        page_nbytes=shape.nbytes,
        shard=part.shard,
        pool=name,
    )
    return CachePool(space=space, host=host, writes=part.writes)


def compute(pool: CachePool, slot: int, page: int) -> None:
    """Fill a slot instead of computing it: each head gets its own number."""
    for plane, array in enumerate(pool.host.arrays()):
        array[slot] = expected(pool, plane, page, array[slot])


def expected(pool: CachePool, plane: int, page: int, like: np.ndarray) -> np.ndarray:
    """Return what a slot contains after `compute`, for the heads of this rank."""
    first, end = pool.space.shard.heads or (0, 1)
    heads = np.arange(first, end).reshape(-1, *[1] * (like.ndim - 1))
    return np.broadcast_to(100 * plane + 10 * page + heads, like.shape)


def serve(name: str, topology: Topology, rank: int, directory: str) -> None:
    """Run a rank: agree with the others on a common prefix, and compute the rest."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are on this host
    hashes = page_hashes(PROMPT, PAGE_TOKENS)
    with ExitStack() as stack:
        ranks: Ranks = SingleRank()
        if topology.size > 1:
            rendezvous = (Path(directory) / "rendezvous").as_uri()
            ranks = TorchRanks.connect(rendezvous, rank=rank, size=topology.size)
        stack.callback(ranks.close)
        storage = stack.enter_context(open_storage("file", {"path": f"{directory}/kv"}))
        store = stack.enter_context(PageStore(storage))
        pools = [cache_pool(pool, topology, rank) for pool in MODEL]
        settings = ControllerSettings(prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
        controller = stack.enter_context(
            CacheController(store, pools, settings, ranks=ranks)
        )

        with controller.prefetch("request-1", hashes).result() as prefix:
            print(f"{name}, rank {rank}: {prefix.pages} of {len(hashes)} pages found")
            for pool, slots in zip(pools, prefix.slots, strict=True):
                for page, slot in enumerate(slots):
                    for plane, array in enumerate(pool.host.arrays()):
                        assert (
                            array[slot] == expected(pool, plane, page, array[slot])
                        ).all()

        missing = hashes[prefix.pages :]
        reservation = controller.reserve(missing)
        for pool, slots in zip(pools, reservation.slots, strict=True):
            for page, slot in enumerate(slots, start=prefix.pages):
                compute(pool, slot, page)
        controller.commit(reservation)
        controller.drain()
        print(
            f"{name}, rank {rank}:"
            f" {store.stats().get('save_ok', 0)} pages written, in all pools"
        )


def run(name: str, topology: Topology, directory: str) -> None:
    """Run an engine with one process per rank."""
    context = multiprocessing.get_context("forkserver")
    # The import takes seconds. The fork server does it once for all ranks.
    context.set_forkserver_preload(["torch.distributed"])
    processes = [
        context.Process(target=serve, args=(name, topology, rank, directory))
        for rank in range(topology.size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise SystemExit(f"{process.name} ended with {process.exitcode}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        run("two ranks", Topology(tp_size=2), directory)
        run("one rank", Topology(), directory)
