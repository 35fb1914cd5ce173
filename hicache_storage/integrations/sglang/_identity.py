"""Key spaces of SGLang's host pools: every fact that the bytes of a page depend on.

    fact                            where it is from                  field
    model                           served name and format tag        model
    weights, draft model, RoPE ...  server arguments, `adapter`       revision
    KV type                         pool, or server arguments         dtype
    byte order, packed drafts       pool                              layout
    layers, heads                   pool, tensor-parallel rank        shard
    context parallelism             storage config                    shard.context
    pipeline stage                  storage config                    layout (layer numbers of hybrid
                                                                      models are not absolute)
    kind of pool                    registration                      pool

A page is shared between ranks where it holds the same bytes, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import ConfigError
from hicache_storage.keys import KeySpace, Shard

if TYPE_CHECKING:
    from hicache_storage.integrations.sglang._engine import HostPool, StorageConfig
    from hicache_storage.integrations.sglang._launch import Launch

_MARKER_LAYOUT = "marker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Names the pages of one rank's pools."""

    config: StorageConfig
    launch: Launch
    tenant: str
    page_tokens: int
    """Tokens that a page hash covers: the anchor pool's, whatever a side pool calls a page."""
    replicated: bool
    """Every tensor-parallel rank holds the same KV."""

    def __post_init__(self) -> None:
        if not self.config.model_name:
            raise ConfigError("sglang: the model has no name: pass --served-model-name")
        if getattr(self.config, "dcp_size", 1) > 1:
            raise ConfigError("sglang: decode context parallelism is not supported")

    def spaces(self, name: str, pool: HostPool, page_nbytes: int, parts: int) -> list[KeySpace]:
        """One key space for each of the `parts` that the heads of `pool` are split into.

        Raises:
            ConfigError: Something that the bytes depend on cannot be told.
        """
        packed = packed_draft_layers(pool)
        first = int(getattr(pool, "start_layer", None) or 0)
        layers = (first, first + max(1, _layer_count(pool)))
        revision = self.launch.revision(
            draft=packed > 0 or name.startswith("draft"), own_draft="its own" if packed else ""
        )
        return [
            KeySpace(
                model=str(self.config.model_name),
                dtype=self._dtype(name, pool),
                layout="+".join([_layout(pool), *self._qualifiers(pool, packed, heads, parts)]),
                page_tokens=self.page_tokens,
                page_nbytes=page_nbytes,
                shard=Shard(layers=layers, heads=heads, context=self._context()),
                pool=name,
                revision=revision,
                tenant=self.tenant,
            )
            for heads in self._heads(name, pool, parts)
        ]

    def is_replicated(self, name: str, pool: HostPool) -> bool:
        """Whether every tensor-parallel rank holds the same bytes."""
        if hasattr(pool, "kv_lora_rank"):
            return True
        if hasattr(pool, "head_num") or name == "mamba":
            return False
        return self.replicated

    def _heads(self, name: str, pool: HostPool, parts: int) -> list[tuple[int, int] | None]:
        if self.is_replicated(name, pool):
            return [None]
        rank = self.config.tp_rank
        if name == "mamba" or not hasattr(pool, "head_num"):
            return [(rank, rank + 1)]  # a slice of something that has no heads
        own = _head_count(pool)
        each = own // parts
        start = rank * own
        return [(start + part * each, start + (part + 1) * each) for part in range(parts)]

    def _qualifiers(
        self, pool: HostPool, packed: int, heads: tuple[int, int] | None, parts: int
    ) -> list[str]:
        """Return what the other fields cannot say, in words behind the layout."""
        config = self.config
        said = [f"packed_draft={packed}"] if packed else []
        if order := _device_order(pool):
            said.append(f"device={order}")
        if config.pp_size > 1:
            said.append(f"pp={config.pp_rank}/{config.pp_size}")
        ranks = config.tp_size * parts
        if heads is not None and ranks > 1 and heads[1] - heads[0] == 1:
            # One head a rank: there may be fewer heads than ranks, and then head 2 of 8 is not head
            # 2 of 16.
            said.append(f"tp={ranks}")
        return said

    def _context(self) -> tuple[int, int] | None:
        size = self.config.attn_cp_size
        return (self.config.attn_cp_rank, size) if size > 1 else None

    def _dtype(self, name: str, pool: HostPool) -> str:
        stored = str(pool.dtype).removeprefix("torch.")
        if stored != "uint8" or holds_nothing(pool):
            return stored
        if hasattr(pool, "head_num") or hasattr(pool, "kv_lora_rank"):
            return self.launch.byte_kv_dtype(name)
        # A format of SGLang's own (index keys with their scales, compressed KV): it follows from the
        # model and the KV type.
        return f"packed-{self.launch.kv_label(name)}"


def packed_draft_layers(pool: HostPool) -> int:
    """Layers of a draft model that stand behind the target's in each page."""
    foreign: Any = pool
    for holder in ("mtp_draft_buffer_infos", "mtp_draft_device_pools"):
        if hasattr(foreign, holder):
            return len(getattr(foreign, holder))
    if not hasattr(foreign, "target_layer_num"):
        return 0
    return max(0, _layer_count(pool) - int(foreign.target_layer_num))


def _layer_count(pool: HostPool) -> int:
    foreign: Any = pool
    return int(getattr(foreign, "num_mamba_layers", None) or getattr(foreign, "layer_num", 0) or 0)


def _head_count(pool: HostPool) -> int:
    foreign: Any = pool
    return int(foreign.head_num)


def _layout(pool: HostPool) -> str:
    return _MARKER_LAYOUT if holds_nothing(pool) else pool.layout


def _device_order(pool: HostPool) -> str:
    """Return the order of heads and tokens in device memory, which host pages keep; "" for the usual.

    SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT set it, which are no server arguments.
    """
    order = getattr(getattr(pool, "device_pool", None), "kv_cache_layout", None)
    return "" if order in (None, "nhd") else str(order)


def holds_nothing(pool: HostPool) -> bool:
    """A logical anchor: slots without memory."""
    return int(getattr(pool, "size_per_token", 1)) == 0
