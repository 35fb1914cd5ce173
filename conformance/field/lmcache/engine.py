"""LMCache's L2 adapters, called as the storage manager of its MP mode calls them.

An L2 adapter takes tasks, and signals through eventfds that some of them are done. As in LMCache's
prefetch controller, only pages that a lookup found are loaded. The lookup is the last `batch_exists`,
or one that `batch_get` makes. Each page is stored by a task of its own, because a task has one result.
The tasks run one after the other, because LMCache's L1 never stores two objects under one key at once.

LMCache's engine passes on these fields of a key space: the tokens of a page (in the chunk hash),
the model, the place of the shard (as a rank number), the pool (as the number of an object group)
and the tenant (as `cache_salt`). It does not pass on dtype, layout and revision.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from typing import TYPE_CHECKING, Any, ClassVar

from field.adapter import (
    EQUAL_PARTS_ONLY,
    NO_CHECKSUM,
    NO_CLEAR,
    NO_CONFIG_CHECK,
    NO_LISTING,
    NO_READ_ONLY,
    AdaptedStorage,
    equal_part,
)
from field.lmcache.tasks import Tasks
from hicache_storage.errors import (
    BackendNotInstalled,
    StorageUnavailable,
    UnsupportedOperation,
)
from hicache_storage.settings import Field, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.keys import KeySpace, Shard
    from hicache_storage.page import Page

POOLS = ("kv", "draft", "draft_indexer", "draft_swa", "indexer", "mamba", "swa")
"""The pools that an engine registers as object groups, in this order: 0, 1, 2, ..."""
_ADAPTERS = "lmcache.v1.distributed.l2_adapters"


class LMCacheSettings(Settings):
    """Settings of the engine, whose ranks hold the shards of key spaces, and of its adapter."""

    total_heads: int = Field(default=16, ge=1)
    """The model's KV heads: a shard of `n` is one of `total_heads / n` tensor-parallel ranks."""
    total_layers: int = Field(default=32, ge=1)
    l2_adapter: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further fields of `--l2-adapter`, passed to the adapter unchanged."""


class LMCacheStorage(AdaptedStorage):
    """One of LMCache's L2 adapters: one instance for all models and ranks, as in LMCache's server."""

    distribution = "lmcache"
    absent: ClassVar[Mapping[str, str]] = {
        **NO_CONFIG_CHECK,
        **NO_CLEAR,
        **NO_CHECKSUM,
        **EQUAL_PARTS_ONLY,
        **NO_LISTING,
        **NO_READ_ONLY,
    }

    def __init__(self, settings: LMCacheSettings, kind: str, fields: Mapping[str, Any]) -> None:
        self._engine = settings
        try:
            self._adapter = _l2_adapter(kind, {**settings.l2_adapter, **fields})
            self._tasks = Tasks(self._adapter)
        except (OSError, RuntimeError) as error:  # LMCache's server would not start either
            raise StorageUnavailable(f"the adapter {kind!r} can't be made: {error}") from error
        self._found: set[Any] = set()
        """Keys that a lookup found, and that no load has used since."""

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        if space.pool not in POOLS:
            raise UnsupportedOperation(
                f"{space.pool!r} is none of the pools that an engine registers: {', '.join(POOLS)}"
            )
        _rank(space.shard, self._engine)

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        return self._look_up(self.object_keys(space, hashes))

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        keys = self.object_keys(space, hashes)
        found = self._found.intersection(keys)
        unknown = [key for key in keys if key not in found]
        there = self._look_up(unknown)
        found.update(key for key, ok in zip(unknown, there, strict=True) if ok)
        places = [place for place, key in enumerate(keys) if key in found]
        loaded: list[bool] = []
        if places:
            objects = [_memory_object(pages[place]) for place in places]
            loaded = self._tasks.load([keys[place] for place in places], objects).result()
            self._found.difference_update(keys)
        arrived = {place for place, ok in zip(places, loaded, strict=True) if ok}
        return [place in arrived for place in range(len(keys))]

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        keys = self.object_keys(space, hashes)
        objects = [_memory_object(page) for page in pages]
        verdicts: list[bool] = []
        for key, one in zip(keys, objects, strict=True):
            verdicts += self._tasks.store([key], [one]).result()
        return verdicts

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Call the adapter's `delete`, as LMCache's eviction does. True means only that it returned."""
        self.ensure_open()
        self._adapter.delete(self.object_keys(space, hashes))
        return [True] * len(hashes)

    def close(self) -> None:
        """Stop the tasks first, then the adapter, as the storage manager does."""
        if not self._closed:
            super().close()
            if not self.is_forked_copy:  # the parent uses the same event descriptors
                self._tasks.close()
                self._adapter.close()

    def object_keys(self, space: KeySpace, hashes: Sequence[str]) -> list[Any]:
        """Return LMCache's `ObjectKey` of each page."""
        object_key = _module("lmcache.v1.distributed.api").ObjectKey
        rank, size = _rank(space.shard, self._engine)
        return [
            object_key(
                chunk_hash=_chunk_hash(space, page_hash),
                model_name=space.model,
                kv_rank=object_key.ComputeKVRank(size, rank, size, rank),
                object_group_id=POOLS.index(space.pool),
                cache_salt=space.tenant,
            )
            for page_hash in hashes
        ]

    def _look_up(self, keys: list[Any]) -> list[bool]:
        """Return whether each page exists. Submit no task if there are no keys, as LMCache does.

        The locks of found keys are released at once, because these adapters do not use them.
        """
        if not keys:
            return []
        there = self._tasks.look_up(keys).result()
        found = [key for key, ok in zip(keys, there, strict=True) if ok]
        self._adapter.submit_unlock(found)
        self._found.difference_update(keys)
        self._found.update(found)
        return there


def file_name(key: Any) -> str:
    """Return the name of a page's file, in `fs` and in `fs_native`."""
    name: str = _module(f"{_ADAPTERS}.fs_l2_adapter")._object_key_to_filename(key)  # noqa: SLF001 - it has no public one
    return name


def redis_key(key: Any) -> str:
    """Return the key of a page in Redis."""
    adapter = _module(f"{_ADAPTERS}.native_connector_l2_adapter")
    name: str = adapter._object_key_to_string(key)  # noqa: SLF001 - it has no public one
    return name


def s3_object(key: Any) -> str:
    """Return the name of a page's object in the bucket."""
    adapter = _module(f"{_ADAPTERS}.s3_l2_adapter")
    name: str = adapter._object_key_to_string(key)  # noqa: SLF001 - it has no public one
    return name


def _chunk_hash(space: KeySpace, page_hash: str) -> bytes:
    """Return the hash of a chunk, over the chunk size, the chunk's tokens and all tokens before them."""
    return hashlib.sha256(f"{space.page_tokens}|{page_hash}".encode()).digest()


def _rank(shard: Shard, engine: LMCacheSettings) -> tuple[int, int]:
    """Return a shard's rank, and how many ranks there are: `kv_worker_id` and `kv_world_size`.

    Ranks are numbered by pipeline stage, then by tensor-parallel rank, then by context rank. If
    heads are replicated, there is only one tensor-parallel rank.
    """
    stage, stages = equal_part(shard.layers, engine.total_layers, "layers")
    part, parts = equal_part(shard.heads, engine.total_heads, "heads") if shard.heads else (0, 1)
    context, contexts = shard.context or (0, 1)
    return (stage * parts + part) * contexts + context, stages * parts * contexts


def _l2_adapter(kind: str, fields: Mapping[str, Any]) -> Any:
    """Return the adapter of `--l2-adapter '{"type": KIND, ...}'`."""
    registry = _module(f"{_ADAPTERS}.config")
    config = registry.get_l2_adapter_config_class(kind).from_dict({"type": kind, **fields})
    return _module(_ADAPTERS).create_l2_adapter(config)


def _memory_object(page: Page) -> Any:
    """Return a page as an object of LMCache's L1, over the page's memory or, if read-only, a copy."""
    torch = _module("torch")
    memory = _module("lmcache.v1.memory_management")
    (segment,) = page.segments
    data = torch.frombuffer(bytearray(segment) if segment.readonly else segment, dtype=torch.uint8)
    note = memory.MemoryObjMetadata(
        shape=data.shape, dtype=data.dtype, address=0, phy_size=page.nbytes, ref_count=1
    )
    return memory.TensorMemoryObj(data, note, None)


def _module(name: str) -> Any:
    """Return a module of LMCache, or torch, with usage reports off.

    Raises:
        BackendNotInstalled: The module is not installed.
    """
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    try:
        importlib.import_module("torch")  # LMCache's native libraries are linked against it
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise BackendNotInstalled(
            "LMCache's adapters need its wheel: pip install --no-deps lmcache==0.5.6"
            f" (benchmarks/requirements-lmcache.txt has what its modules import): {error}"
        ) from error
