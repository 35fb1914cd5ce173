"""The engine side of vLLM's secondary tiers: their configs, keys and rows.

A secondary tier belongs to vLLM's scheduler process. Its pages are the rows of the CPU tier. A row
holds the bytes of all ranks of one chunk, is as long as the chunk, and is padded to 4096 bytes. All
rows are equally long, whatever their group is.

vLLM passes on these fields of a key space: the model, the dtype, the tokens of a page and the
layers (as the names of the layers of each group), the pool (as the number of a group in the key)
and the tenant (as `cache_salt`, in the hash of the block). It does not pass on layout and revision.
"""

from __future__ import annotations

import hashlib
import importlib
import mmap
import os
import threading
import uuid
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import BackendNotInstalled, UnsupportedOperation
from hicache_storage.settings import ByteSize, Field, Settings

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

POOLS = ("kv", "draft", "draft_indexer", "draft_swa", "indexer", "mamba", "swa")
"""The pools of an engine. Each stands for the group of the KV cache with its number in this list."""
WHOLE_ROWS_ONLY = {
    "open_space": "a row holds the bytes of all ranks: no page is one of a part of the model"
}
"""An entry for `AdaptedStorage.absent`."""
_MOST_ROWS = 64


class TierSettings(Settings):
    """Settings of the engine, whose key spaces hold the whole model, and of its secondary tier."""

    total_heads: int = Field(default=8, ge=1)
    """How many KV heads the model has."""
    cpu_bytes_to_use: ByteSize = Field(default=256 << 20, gt=0)
    """The size of the CPU tier. At most 64 of its rows are used."""
    secondary_tier: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further fields of the tier's entry in `secondary_tiers`, passed to the tier unchanged."""


class Rows:
    """The memory of an engine's CPU tier, in rows. Thread-safe.

    As in vLLM, the padding of a row keeps the bytes that were there before.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self.count = count
        self.view = memoryview(mmap.mmap(-1, count * nbytes)).cast("B", (count, nbytes))
        """The memory as a tier receives it."""
        self._flat = self.view.cast("B")
        self._nbytes = nbytes
        self._free = list(range(count))
        self._returned = threading.Condition()

    @contextmanager
    def reserved(self, count: int) -> Generator[list[int], None, None]:
        """Wait until `count` rows are free, and reserve them for the block. Yield their numbers."""
        with self._returned:
            self._returned.wait_for(lambda: len(self._free) >= count)
            rows = [self._free.pop() for _ in range(count)]
        try:
            yield rows
        finally:
            with self._returned:
                self._free += rows
                self._returned.notify_all()

    def write(self, row: int, page: Page) -> None:
        """Copy a page into a row."""
        start = row * self._nbytes
        for segment in page.segments:
            self._flat[start : start + segment.nbytes] = segment
            start += segment.nbytes

    def read(self, row: int, page: Page) -> None:
        """Copy the start of a row into a page."""
        start = row * self._nbytes
        page.copy_from(self._flat[start : start + page.nbytes])


def require_whole_rows(space: KeySpace, settings: TierSettings) -> None:
    """Refuse a key space if a page of it is not a whole row.

    Raises:
        UnsupportedOperation: The shard is only a part of the model, or no group stands for the pool.
    """
    shard = space.shard
    if space.pool not in POOLS:
        raise UnsupportedOperation(
            f"{space.pool!r} is none of the groups that an engine has: {', '.join(POOLS)}"
        )
    if shard.layers[0] or shard.context or shard.heads not in (None, (0, settings.total_heads)):
        raise UnsupportedOperation(
            f"layers {shard.layers}, heads {shard.heads}, context {shard.context} are a part of the"
            f" model with {settings.total_heads} heads: a row holds the bytes of all ranks"
        )


def offload_key(space: KeySpace, page_hash: str) -> bytes:
    """Return vLLM's key of a page: a hash of the tenant and the page hash, and the group's number."""
    digest = hashlib.sha256(f"{space.tenant}|{page_hash}".encode()).digest()
    key: bytes = module("vllm.v1.kv_offload.base").make_offload_key(digest, POOLS.index(space.pool))
    return key


def offloading_spec(space: KeySpace, settings: TierSettings) -> Any:
    """Return vLLM's `TieringOffloadingSpec` for an engine with one worker that serves the model."""
    config = module("vllm.v1.kv_offload.config")
    groups = tuple(
        config.OffloadingGroupConfig(
            tokens_per_block=space.page_tokens,
            layer_names=tuple(
                f"{pool}.layers.{layer}.attn" for layer in range(*space.shard.layers)
            ),
            group_id=number,
        )
        for number, pool in enumerate(POOLS)
    )
    return module("vllm.v1.kv_offload.factory").OffloadingSpecFactory.create_spec(
        config.OffloadingConfig(
            groups=groups,
            worker_kv_bytes_per_block=space.stored_nbytes,
            enable_kv_cache_events=False,
            extra_config={
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": settings.cpu_bytes_to_use,
            },
            engine_id=uuid.uuid4().hex,
            model=config.OffloadingModelConfig(space.model, space.dtype),
            cache=config.OffloadingCacheConfig(space.page_tokens, 1),
            parallel=_one_worker(config),
            kv_cache_layout="LBHNC",
        )
    )


def rows_of(spec: Any) -> Rows:
    """Return rows of the size that vLLM computes, at least two and at most 64."""
    return Rows(max(2, min(_MOST_ROWS, spec.num_chunks)), spec.kv_bytes_per_chunk)


def secondary_tier(fields: Mapping[str, Any], rows: Rows, spec: Any) -> Any:
    """Return the tier that vLLM's factory makes from an entry of `secondary_tiers`."""
    factory = module("vllm.v1.kv_offload.tiering.factory").SecondaryTierFactory
    return factory.create_secondary_tier(dict(fields), rows.view, spec)


def preload() -> None:
    """Import vLLM's modules now, if they are installed.

    The import takes seconds. Processes that the kit forks later do not repeat it.
    """
    with suppress(BackendNotInstalled):
        module("vllm.v1.kv_offload.tiering.fs.manager")
        module("vllm.v1.kv_offload.tiering.spec")


def _one_worker(config: Any) -> Any:
    return config.OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,  # True needs a single group
    )


def module(name: str) -> Any:
    """Return a module of vLLM, without a usage report and without its log handlers.

    Raises:
        BackendNotInstalled: The module is not installed.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise BackendNotInstalled(
            "vLLM's secondary tiers need its Python files and what they import"
            f" (tests/requirements-vllm.txt, tests/install_vllm.py): {error}"
        ) from error
