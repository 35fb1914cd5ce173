"""The base of the adapters for SGLang's zero-copy backends.

KV pages take the path of `_page_get_zero_copy` and `_page_set_zero_copy` of the cache controller
(`batch_get_v1`, `batch_set_v1`). Pages of other pools take the path of its sidecar pools
(`batch_get_v2`, `batch_set_v2`). In an engine the host pool is the engine's own; here it is a
bounce buffer.
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any, ClassVar

from field.adapter import (
    EQUAL_PARTS_ONLY,
    NO_CHECKSUM,
    NO_CONFIG_CHECK,
    NO_DELETE,
    NO_LISTING,
    NO_READ_ONLY,
    results_from_prefix_counts,
)
from field.sglang.engine import (
    BATCH_PAGES,
    KV,
    SGLangStorage,
    module,
    page_keys,
)
from field.sglang.host_pool import HostPool, host_pool
from hicache_storage.storage import Capabilities, Durability, Retention

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


class Rank:
    """One process of an engine: an instance of the backend, and the engine's host pools."""

    def __init__(self, backend: Any, space: KeySpace) -> None:
        self.backend = backend
        self._pools = {KV: _pool_for(space)}
        self._lock = threading.Lock()
        backend.register_mem_pool_host(self._pools[KV])

    def pool(self, space: KeySpace) -> HostPool:
        """Return the host pool of these pages. The first use of a pool other than KV registers it."""
        with self._lock:
            if space.pool not in self._pools:
                pool = _pool_for(space)
                self.backend.register_mem_host_pool_v2(pool, pool_name(space))
                self._pools[space.pool] = pool
            return self._pools[space.pool]

    def close(self) -> None:
        """Close the backend if it has a `close`, as the controller does when it detaches a backend."""
        if hasattr(self.backend, "close"):
            self.backend.close()


class ZeroCopyStorage(SGLangStorage):
    """An adapter for a backend that reads and writes the engine's host pool. `rank` returns a `Rank`."""

    absent: ClassVar[Mapping[str, str]] = {
        **NO_CONFIG_CHECK,
        **EQUAL_PARTS_ONLY,
        **NO_DELETE,
        **NO_CHECKSUM,
        **NO_LISTING,
        **NO_READ_ONLY,
    }
    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.CRASH,
        shared=True,
        scatter_gather=False,
        max_batch=BATCH_PAGES,
    )

    def engine_key(self, space: KeySpace) -> int:
        """Return the size of a page, because all pages of an engine have the same size."""
        return space.stored_nbytes

    def close(self) -> None:
        """Close and forget the backends, as when the controller detaches them. Running calls go on."""
        super().close()
        with self._lock:
            self._ranks.clear()

    def make_rank(self, space: KeySpace, config: Any) -> Rank:
        return Rank(self.make_backend(config), space)

    def sidecar_exists(self, backend: Any, space: KeySpace, keys: Sequence[str]) -> list[bool]:
        """Return whether each page of a pool other than KV exists.

        `batch_exists_v2` reports this only for pages whose KV page exists too. So the adapter makes
        the query for the pool itself, without that condition.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no sidecar_exists(self, backend, space, keys)"
        )

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        rank, keys = self.rank(space), page_keys(space, hashes)
        if space.pool == KV:
            return results_from_prefix_counts(rank.backend.batch_exists, keys)
        rank.pool(space)
        return self.sidecar_exists(rank.backend, space, keys)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        rank = self.rank(space)
        pool = rank.pool(space)
        with pool.take_slots(len(pages)) as slots:
            found = _transfer(rank.backend, "get", space, page_keys(space, hashes), slots)
            for hit, slot, page in zip(found, slots, pages, strict=False):
                if hit:
                    pool.read(slot, page)
        return found

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        rank = self.rank(space)
        pool = rank.pool(space)
        with pool.take_slots(len(pages)) as slots:
            for slot, page in zip(slots, pages, strict=True):
                pool.fill(slot, page)
            return _transfer(rank.backend, "set", space, page_keys(space, hashes), slots)


def _pool_for(space: KeySpace) -> HostPool:
    replicated = space.shard.heads is None
    return host_pool(space.stored_nbytes, pool=space.pool, replicated=replicated)


def pool_name(space: KeySpace) -> Any:
    """Return SGLang's name of the pool: a `PoolName`, or text."""
    names = module("mem_cache.hicache_storage").PoolName
    return names(space.pool) if space.pool in {one.value for one in names} else space.pool


def _transfer(
    backend: Any, verb: str, space: KeySpace, keys: list[str], slots: list[int]
) -> list[bool]:
    """Call `batch_{verb}_v1` for KV pages or `batch_{verb}_v2` for others. Return a result per page."""
    torch: Any = importlib.import_module("torch")
    indices = torch.tensor(slots, dtype=torch.int64)
    if space.pool == KV:
        zero_copy: Callable[..., list[bool]] = getattr(backend, f"batch_{verb}_v1")
        return zero_copy(keys, indices, None)
    name = pool_name(space)
    transfer = module("mem_cache.hicache_storage").PoolTransfer
    wanted = transfer(name=name, host_indices=indices, keys=keys)
    answers: dict[Any, list[bool]] = getattr(backend, f"batch_{verb}_v2")([wanted], extra_info=None)
    return answers[name]
