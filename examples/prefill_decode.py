"""Hand a prompt over from a process that computes it to one that decodes it."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import tempfile
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from hicache_storage import KeySpace, Shard, open_storage, page_hashes
from hicache_storage.controller import CacheController, CachePool, ControllerSettings
from hicache_storage.handoff import HandoffReceiver, HandoffSender
from hicache_storage.host_pool import HostPool, PageShape
from hicache_storage.page_store import PageStore

if TYPE_CHECKING:
    from collections.abc import Generator

PAGE_TOKENS = 64
PROMPT = list(range(1000, 1000 + 20 * PAGE_TOKENS))
REQUEST_ID = "request-1"
SHAPES = {
    "kv": PageShape.mla(page_tokens=PAGE_TOKENS, layers=4, kv_dim=64, dtype="bfloat16"),
    "draft": PageShape.mha(
        page_tokens=PAGE_TOKENS, layers=1, heads=2, head_dim=32, dtype="bfloat16"
    ),
}


@contextmanager
def engine(directory: str) -> Generator[tuple[CacheController, PageStore], None, None]:
    """Open one engine's cache: 256 pages of target and draft, over the directory."""
    with ExitStack() as stack:
        storage = stack.enter_context(open_storage("file", {"path": directory}))
        store = stack.enter_context(PageStore(storage))
        pools: list[CachePool] = []
        for name, shape in SHAPES.items():
            space = KeySpace(
                model="example/tiny-model",
                dtype=shape.dtype,
                layout="page_first",
                page_tokens=PAGE_TOKENS,
                page_nbytes=shape.nbytes,
                shard=Shard(
                    layers=(0, shape.layers), heads=(0, 2) if name == "draft" else None
                ),
                pool=name,
            )
            host = HostPool(shape, slots=256)
            pools.append(CachePool(space=space, host=host))
        settings = ControllerSettings(
            prefetch_threshold_tokens=0
        )  # prefetch every page of the prompt
        yield stack.enter_context(CacheController(store, pools, settings)), store


def computed(pool: str, page_hash: str, nbytes: int) -> bytes:
    """Return a page's content, which stands for a model's output."""
    return hashlib.shake_128(f"{pool} {page_hash}".encode()).digest(nbytes)


def prefill(directory: str) -> None:
    """Compute every page of the prompt, and publish it once all are in storage."""
    hashes = page_hashes(PROMPT, PAGE_TOKENS)
    with (
        engine(directory) as (controller, store),
        HandoffSender(controller, store) as sender,
    ):
        reservation = controller.reserve(hashes)
        for pool, slots in zip(controller.cache.pools, reservation.slots, strict=True):
            for page_hash, slot in zip(reservation.hashes, slots, strict=True):
                page = pool.host.page(slot)
                page.copy_from(computed(pool.space.pool, page_hash, page.nbytes))
        controller.commit(reservation)
        pages = sender.publish(REQUEST_ID, hashes).result()
        print(f"prefill, process {os.getpid()}: {pages} pages handed over", flush=True)


def decode(directory: str) -> None:
    """Wait for the prompt's pages and check them.

    A real engine would compute missing ones.
    """
    hashes = page_hashes(PROMPT, PAGE_TOKENS)
    with (
        engine(directory) as (controller, store),
        HandoffReceiver(controller, store) as receiver,
        receiver.expect(REQUEST_ID, hashes).result() as prefix,
    ):
        # Here an engine copies prefix.slots to its device. The pages keep their slots.
        wrong = 0
        for pool, slots in zip(controller.cache.pools, prefix.slots, strict=True):
            for page_hash, slot in zip(hashes, slots, strict=False):
                page = pool.host.page(slot)
                wrong += page.tobytes() != computed(
                    pool.space.pool, page_hash, page.nbytes
                )
        print(
            f"decode, process {os.getpid()}:"
            f" {prefix.pages} of {len(hashes)} pages received,"
            f" {len(hashes) - prefix.pages} to compute, {wrong} wrong",
            flush=True,
        )
        if wrong or prefix.pages != len(hashes):
            raise SystemExit("a page is missing or wrong")


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        sides = [
            spawn.Process(target=side, args=(directory,)) for side in (decode, prefill)
        ]
        for process in sides:
            process.start()
        for process in sides:
            process.join()
        if any(process.exitcode for process in sides):
            raise SystemExit("a side failed")
