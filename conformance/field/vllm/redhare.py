"""Redhare's `KvStore`, called as its vLLM connector calls it.

The connector passes on every field of a key space but the memory layout: model, revision, dtype,
layers, tokens and size of a page are in a hash (`build_layout_namespace`), the shard and the pool are
in the key, and the tenant is in the block hash.
"""

from __future__ import annotations

import hashlib
import importlib
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from field.adapter import equal_part
from field.vllm.connectors import POOLS, Buffers, ConnectorStorage, ModelSettings
from field.vllm.engine import module, preload
from hicache_storage.errors import StorageUnavailable, UnsupportedOperation
from hicache_storage.settings import ByteSize, Field
from hicache_storage.storage import Capabilities, Durability, Retention, StorageStats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.keys import KeySpace


preload()


@dataclass(frozen=True)
class _CacheSpec:
    """What the connector hashes of vLLM's `FullAttentionSpec`."""

    block_size: int
    num_kv_heads: int
    dtype: str


class RedhareSettings(ModelSettings):
    """Settings of the engine and the connector."""

    redis_url: str
    """Where the clients of a cluster find each other."""
    cluster: str = "default"
    shared_fs_root: str | None = None
    """The directory of its cold tier, which outlives the clients."""
    capacity_nbytes: ByteSize = Field(default=256 << 20, gt=0)


class Redhare(ConnectorStorage):
    """`redhare.KvStore` over TCP: pages are in the memory of the process that set them."""

    distribution = "redhare"
    capabilities = Capabilities(
        retention=Retention.UNTIL_PRESSURE,
        durability=Durability.PROCESS,
        overwrites=False,
        scatter_gather=False,
    )

    def __init__(self, settings: RedhareSettings) -> None:
        super().__init__()
        self._settings = settings
        self._counters: Counter[str] = Counter()
        if settings.shared_fs_root is not None:
            self.narrow(durability=Durability.CRASH)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(RedhareSettings.parse("redhare", config))

    def make_client(self) -> Any:
        settings = self._settings
        try:
            return importlib.import_module("redhare").KvStore(
                redis_url=settings.redis_url,
                client_id=uuid.uuid4().hex,
                data_plane_addr="127.0.0.1:0",
                capacity=settings.capacity_nbytes,
                cluster=settings.cluster,
                transport="tcp",
                shared_fs_root=settings.shared_fs_root,
            )
        except (OSError, RuntimeError) as error:  # vLLM's worker would not start either
            raise StorageUnavailable(f"Redhare's client can't be made: {error}") from error

    def key_of(self, space: KeySpace, page_hash: str) -> str:
        """Return the key of a page, as the connector's worker makes it."""
        settings, shard = self._settings, space.shard
        if space.pool not in POOLS:
            raise UnsupportedOperation(f"{space.pool!r} is none of the pools {', '.join(POOLS)}")
        heads = shard.heads and equal_part(shard.heads, settings.total_heads, "heads")
        stage, _ = equal_part(shard.layers, settings.total_layers, "layers")
        context, contexts = shard.context or (0, 1)
        data = module("redhare.vllm_connector.data")
        names = [f"{space.pool}.layers.{layer}.attn" for layer in range(*shard.layers)]
        namespace = data.build_layout_namespace(
            model_id=space.model,
            revision=space.revision,
            dtype=space.dtype,
            cache_spec=_CacheSpec(space.page_tokens, settings.total_heads, space.dtype),
            layer_names=names,
            segment_lengths=[space.frame_nbytes, space.page_nbytes],
            full_block_only=[False, False],
            chunk_size=space.page_tokens,
            group_block_size=space.page_tokens * contexts,
        )
        tp_rank, tp_size = heads or (0, 1)
        metadata = data.KeyMetadata(
            model_name=namespace,
            producer_tp_size=tp_size,
            shard_id=tp_rank,
            pcp_rank=0,
            dcp_rank=context,
            pp_rank=stage,
            group_id=POOLS.index(space.pool),
        )
        digest = hashlib.sha256(f"{space.tenant}|{page_hash}".encode()).hexdigest()
        return str(data._build_key(metadata, digest))  # noqa: SLF001 - there is no public one

    def ask(self, client: Any, keys: list[Any]) -> list[bool]:
        return [state == 1 for state in client.batch_is_exist(keys)]

    def move(self, client: Any, verb: str, keys: list[Any], buffers: Buffers) -> list[bool]:
        calls = {
            "get": client.batch_get_into_multi_buffers,
            "set": client.batch_put_from_multi_buffers,
        }
        return [state == 0 for state in calls[verb](keys, buffers.addresses, buffers.sizes)]

    def stats(self) -> StorageStats:
        """Return the client's counters, which it reports as what was added since the last time."""
        client = self.client()
        with self._lock:
            self._counters.update(client.drain_connector_stats()["counters"])
            return StorageStats(counters=dict(self._counters))
