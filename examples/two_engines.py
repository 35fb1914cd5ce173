"""Let two engines share a directory: one computes pages, the other loads them."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack

from hicache_storage import KeySpace, Shard, open_storage, page_hashes
from hicache_storage.controller import (
    CacheController,
    CachePool,
    ControllerSettings,
    PrefetchPolicy,
)
from hicache_storage.host_pool import HostPool, PageShape
from hicache_storage.page_store import PageStore

PAGE_TOKENS = 64
SHAPES = {
    "kv": PageShape.mha(
        page_tokens=PAGE_TOKENS, layers=4, heads=2, head_dim=32, dtype="bfloat16"
    ),
    "draft": PageShape.mha(
        page_tokens=PAGE_TOKENS, layers=1, heads=2, head_dim=32, dtype="bfloat16"
    ),
}


def cache_pool(name: str, shape: PageShape) -> CachePool:
    """Return a pool: host memory for 256 pages, and their key space."""
    space = KeySpace(
        model="example/tiny-llama",
        dtype=shape.dtype,
        layout="page_first",
        page_tokens=PAGE_TOKENS,
        page_nbytes=shape.nbytes,
        shard=Shard(layers=(0, shape.layers), heads=(0, 2)),
        pool=name,
    )
    return CachePool(space=space, host=HostPool(shape, slots=256))


def serve(name: str, directory: str, prompt: list[int]) -> None:
    """Run an engine: find the longest prefix of a prompt, and compute the rest."""
    hashes = page_hashes(prompt, PAGE_TOKENS)
    with ExitStack() as stack:
        storage = stack.enter_context(open_storage("file", {"path": directory}))
        store = stack.enter_context(PageStore(storage))
        pools = [cache_pool(pool, shape) for pool, shape in SHAPES.items()]
        settings = ControllerSettings(prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
        controller = stack.enter_context(CacheController(store, pools, settings))

        with controller.prefetch("request-1", hashes).result() as prefix:
            # An engine copies prefix.slots to its device. The pages keep their slots.
            found = f"{prefix.pages} of {len(hashes)} pages found"
            print(f"{name}: {found}, {prefix.l3_pages} of them in storage")
            missing = hashes[prefix.pages :]

        reservation = controller.reserve(missing)
        for pool, slots in zip(pools, reservation.slots, strict=True):
            for slot in slots:  # here an engine copies its computed pages
                pool.host.page(slot).copy_from(bytes(pool.space.page_nbytes))
        controller.commit(reservation)


if __name__ == "__main__":
    prompt = list(range(1000, 1000 + 20 * PAGE_TOKENS))
    with tempfile.TemporaryDirectory() as directory:
        serve("first engine", directory, prompt)
        serve("second engine", directory, prompt + list(range(5 * PAGE_TOKENS)))
