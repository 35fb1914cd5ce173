"""Both sides of a hand-off for tests: ranks of engines, and a prefill rank as a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pages import hash_of, space

from hicache_storage.controller import (
    CacheController,
    CachePool,
    ControllerSettings,
    PrefetchPolicy,
)
from hicache_storage.controller.handoff import HandoffReceiver, HandoffSender, HandoffSettings
from hicache_storage.hit_policy import HitPolicy
from hicache_storage.host_pool import HostPool, PageShape
from hicache_storage.keys import Shard
from hicache_storage.page_store import PageStore, PageStoreSettings
from hicache_storage.registry import open_storage

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from hicache_storage.controller import Lease, Reservation
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.storage import HiCacheStorage

HEADS = 4
PAGE_TOKENS = 16
WINDOW_PAGES = 3
PROMPT = [hash_of(number) for number in range(24)]
HALF = len(PROMPT) // 2
CONTROLLER = ControllerSettings(
    prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, prefetch_threshold_tokens=0
)
PATIENT = HandoffSettings(timeout_s=60)
HASTY = HandoffSettings(timeout_s=0.3, poll_max_s=0.02, load_every_s=0.1)
KINDS = ("mla-mha", "mha-mla", "mha-mha", "mla-mla")


def rank_pools(kind: str, rank: int, size: int, frame_nbytes: int) -> list[CachePool]:
    """Target and draft of rank `rank` of `size`: latent pages are every rank's, heads are shared out.

    `swa` has heads too, and a prefix needs only its last pages.
    """
    pools: list[CachePool] = []
    for name, attention, layers in zip(("kv", "draft"), kind.split("-"), (3, 1), strict=True):
        heads = HEADS // size
        if attention == "mla":
            shape = PageShape.mla(
                page_tokens=PAGE_TOKENS, layers=layers, kv_dim=8, dtype="bfloat16"
            )
            shard = Shard(layers=(0, layers))
        else:
            shape = PageShape.mha(
                page_tokens=PAGE_TOKENS, layers=layers, heads=heads, head_dim=4, dtype="bfloat16"
            )
            shard = Shard(layers=(0, layers), heads=(rank * heads, rank * heads + heads))
        key_space = space(pool=name, page_tokens=PAGE_TOKENS, page_nbytes=shape.nbytes, shard=shard)
        host = HostPool(shape, slots=64, frame_nbytes=frame_nbytes)
        pools.append(
            CachePool(
                space=key_space,
                host=host,
                required=name == "kv",
                writes=rank == 0 or attention != "mla",
                hit_policy=HitPolicy.TRAILING_PAGES if attention == "swa" else HitPolicy.ALL_PAGES,
                window_pages=WINDOW_PAGES,
            )
        )
    return pools


@contextmanager
def engine_rank(
    storage: HiCacheStorage,
    kind: str = "mla-mha",
    rank: int = 0,
    size: int = 1,
    settings: ControllerSettings = CONTROLLER,
) -> Generator[tuple[CacheController, PageStore], None, None]:
    """One rank's cache over `storage`."""
    with ExitStack() as stack:
        store = stack.enter_context(PageStore(storage, PageStoreSettings(timeout_s=5)))
        pools = rank_pools(kind, rank, size, store.frame_nbytes)
        yield stack.enter_context(CacheController(store, pools, settings)), store


@contextmanager
def sending(storage: HiCacheStorage, **rank: Any) -> Generator[HandoffSender, None, None]:
    """A prefill rank; `handoff` are its settings."""
    settings = rank.pop("handoff", PATIENT)
    with (
        engine_rank(storage, **rank) as (controller, store),
        HandoffSender(controller, store, settings) as sender,
    ):
        yield sender


@contextmanager
def receiving(storage: HiCacheStorage, **rank: Any) -> Generator[HandoffReceiver, None, None]:
    """A decode rank; `handoff` are its settings."""
    settings = rank.pop("handoff", PATIENT)
    with (
        engine_rank(storage, **rank) as (controller, store),
        HandoffReceiver(controller, store, settings) as receiver,
    ):
        yield receiver


def content(key_space: KeySpace, page_hash: str) -> bytes:
    """The bytes of a stored page: a function of its key space and hash, and of nothing else."""
    seed = hashlib.sha256(f"{key_space.id}{page_hash}".encode()).digest()
    return (seed * (key_space.page_nbytes // len(seed) + 1))[: key_space.page_nbytes]


def compute(
    controller: CacheController, hashes: Sequence[str], *, without: Sequence[str] = ()
) -> None:
    """Prefill: fill new pages in every pool but those `without`, and commit them."""
    fresh = controller.reserve(hashes, timeout_s=20)
    assert fresh.pages == len(hashes)
    for page_hash, key_space, page in _parts(controller.cache.pools, hashes, fresh):
        if key_space.pool not in without:
            page.copy_from(content(key_space, page_hash))
    controller.commit(fresh, without=without)


def is_right(lease: Lease, hashes: Sequence[str] = PROMPT) -> bool:
    """Whether every page of every pool holds what was written under its key."""
    return all(
        page.tobytes() == content(key_space, page_hash)
        for page_hash, key_space, page in _parts(lease.cache.pools, hashes, lease)
    )


def _parts(
    pools: Sequence[CachePool], hashes: Sequence[str], held: Lease | Reservation
) -> Iterator[tuple[str, KeySpace, Page]]:
    """Each page as storage has it: its hash, the key space of a rectangle, and the memory."""
    for pool, indices, slots in zip(pools, held.indices, held.slots, strict=True):
        for transfer in pool.transfers([hashes[index] for index in indices], slots):
            for page_hash, page in zip(transfer.hashes, transfer.pages, strict=True):
                yield page_hash, transfer.space, page.payload


def left_behind(storage: HiCacheStorage) -> dict[str, int]:
    """How many pages there are in each pool, completions included."""
    left: dict[str, int] = {}
    for key_space in storage.spaces():
        pages = sum(1 for _ in storage.scan(key_space))
        if pages:
            left[key_space.pool] = left.get(key_space.pool, 0) + pages
    return left


def start_prefill(
    backend: str,
    config: dict[str, Any],
    *,
    kind: str = "mla-mha",
    rank: int = 0,
    size: int = 1,
    dies: str = "never",
) -> subprocess.Popen[str]:
    """A process that computes and publishes PROMPT as `request-1`, or is killed on the way."""
    order: dict[str, Any] = {"backend": backend, "config": config, "dies": dies}
    order |= {"kind": kind, "rank": rank, "size": size}
    return subprocess.Popen(
        [sys.executable, "-W", "error", __file__, json.dumps(order)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        text=True,
    )


def _prefill(order: dict[str, Any]) -> None:
    dies = order["dies"]
    with (
        open_storage(order["backend"], order["config"]) as storage,
        engine_rank(storage, order["kind"], order["rank"], order["size"]) as (controller, store),
        HandoffSender(controller, store, PATIENT) as sender,
    ):
        if dies == "before its writes":
            os.kill(os.getpid(), signal.SIGKILL)
        compute(controller, PROMPT[:HALF])
        assert controller.drain(20)
        if dies == "within its writes":
            os.kill(os.getpid(), signal.SIGKILL)
        compute(controller, PROMPT[HALF:])
        if dies == "after its writes":
            assert controller.drain(20)
            os.kill(os.getpid(), signal.SIGKILL)
        assert sender.publish("request-1", PROMPT).result(60) == len(PROMPT)
        if dies == "after its completion":
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _prefill(json.loads(sys.argv[1]))
