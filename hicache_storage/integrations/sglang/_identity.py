"""Key spaces of SGLang's host pools, made of every property that the bytes of a page depend on.

    property                        source                            field
    model                           served name and format tag        model
    weights, draft model, RoPE ...  arguments, environment, `adapter` revision
    KV type                         pool on the device                dtype
    byte order, packed drafts       pool                              layout
    platform, SGLang's release      torch, SGLang                     layout
    layers, heads                   pool, tensor-parallel rank        shard
    context parallelism             storage config                    shard.context
    pipeline stage                  storage config                    layout (layer numbers of hybrid
                                                                      models are not absolute)
    kind of pool                    registration                      pool

Ranks share a page if and only if it holds the same bytes on all these ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import ConfigError
from hicache_storage.keys import KeySpace, Shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.integrations.sglang._engine import HostPool, StorageConfig
    from hicache_storage.integrations.sglang._launch import LaunchIdentity

_MARKER_LAYOUT = "marker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The identity of one rank's pages, which makes the key spaces of its pools."""

    config: StorageConfig
    launch: LaunchIdentity
    tenant: str
    page_tokens: int
    """How many tokens a page hash covers: the page size of the anchor pool, even for side pools."""
    replicated: bool
    """True if every tensor-parallel rank holds the same KV."""
    index_key_order: Callable[[], str] = str
    """Function that returns the order of index keys in a page. The usual order is ""."""
    device: str = ""
    """The device of the anchor pool. "": that of the server's arguments."""

    def __post_init__(self) -> None:
        if not self.config.model_name:
            raise ConfigError("sglang: the model has no name: pass --served-model-name")
        if getattr(self.config, "dcp_size", 1) > 1:
            raise ConfigError("sglang: decode context parallelism is not supported")

    def spaces(self, name: str, pool: HostPool, page_nbytes: int, parts: int) -> list[KeySpace]:
        """Return a key space for each of the `parts` into which the heads of `pool` are split.

        Raises:
            ConfigError: A property that the bytes depend on is unknown.
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
                layout="+".join(
                    [_layout(pool), *self._qualifiers(name, pool, packed, heads, parts)]
                ),
                page_tokens=self.page_tokens,
                page_nbytes=page_nbytes,
                shard=Shard(layers=layers, heads=heads, context=self._context()),
                pool=name,
                revision=revision,
                tenant=self.tenant,
            )
            for heads in self._heads(name, pool, parts)
        ]

    def writes(self, name: str, pool: HostPool) -> bool:
        """Return whether this rank writes the pool, as the first rank of those that share its pages."""
        return not self.is_replicated(name, pool) or self.is_first_replica

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank writes the pages that all tensor-parallel ranks hold.

        Ranks of different context parallelism do not share key spaces. SGLang numbers the ranks of one
        context-parallel rank in a row.
        """
        config = self.config
        ranks = config.tp_size
        if not self.launch.has_local_ranks:
            ranks = max(1, ranks // config.attn_cp_size)
        return config.tp_rank % ranks == 0

    def is_replicated(self, name: str, pool: HostPool) -> bool:
        """Return whether every tensor-parallel rank holds the same bytes."""
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
            return [(rank, rank + 1)]  # a slice of data without heads
        own = _head_count(pool)
        size = own // parts
        start = rank * own
        return [(start + part * size, start + (part + 1) * size) for part in range(parts)]

    def _qualifiers(
        self, name: str, pool: HostPool, packed: int, heads: tuple[int, int] | None, parts: int
    ) -> list[str]:
        """Return the properties that have no field of their own. They are appended to the layout."""
        config = self.config
        qualifiers = [f"packed_draft={packed}"] if packed else []
        if order := _device_order(pool):
            qualifiers.append(f"device={order}")
        if _is_packed(name, pool) and (order := self.index_key_order()):
            qualifiers.append(f"index_keys={order}")
        if config.pp_size > 1:
            qualifiers.append(f"pp={config.pp_rank}/{config.pp_size}")
        ranks = config.tp_size * parts
        if heads is not None and ranks > 1 and heads[1] - heads[0] == 1:
            # With one head per rank there may be fewer heads than ranks. Then rank 2 of 8 and rank 2 of
            # 16 hold different heads.
            qualifiers.append(f"tp={ranks}")
        return qualifiers + self.launch.made_by(self.device)

    def _context(self) -> tuple[int, int] | None:
        size = self.config.attn_cp_size
        return (self.config.attn_cp_rank, size) if size > 1 else None

    def _dtype(self, name: str, pool: HostPool) -> str:
        stored = _stored_dtype(pool)
        if _is_packed(name, pool):
            return f"packed-{self.launch.kv_label(name) if stored == 'uint8' else stored}"
        if stored != "uint8" or is_logical(pool):
            return stored
        device_dtype = getattr(getattr(pool, "device_pool", None), "dtype", "")
        return self.launch.byte_kv_dtype(name, str(device_dtype).removeprefix("torch."))


def packed_draft_layers(pool: HostPool) -> int:
    """Return the number of draft layers that follow the target's layers in each page."""
    foreign: Any = pool
    for holder in ("mtp_draft_buffer_infos", "mtp_draft_device_pools"):
        if hasattr(foreign, holder):
            return len(getattr(foreign, holder))
    if not hasattr(foreign, "target_layer_num"):
        return 0
    return max(0, _layer_count(pool) - int(foreign.target_layer_num))


def _stored_dtype(pool: HostPool) -> str:
    """Return the type of a pool's elements. For a pool of Mamba states, return both types.

    The `dtype` of a Mamba pool is the type of its convolution states. The type of the temporal states is
    added unless it is float32, the usual type. Arguments, environment and model determine all other
    types.
    """
    stored = str(pool.dtype).removeprefix("torch.")
    temporal = str(getattr(pool, "temporal_dtype", "float32")).removeprefix("torch.")
    return stored if temporal == "float32" else f"{stored}+{temporal}"


def _is_packed(name: str, pool: HostPool) -> bool:
    """Return whether SGLang's own format fills a pool: compressed KV, or index keys with their scales.

    The model, the KV type, the platform and the release determine it, whatever type the pool shows.
    """
    has_heads = hasattr(pool, "head_num") or hasattr(pool, "kv_lora_rank")
    return not (has_heads or name == "mamba" or is_logical(pool))


def _layer_count(pool: HostPool) -> int:
    foreign: Any = pool
    return int(getattr(foreign, "num_mamba_layers", None) or getattr(foreign, "layer_num", 0) or 0)


def _head_count(pool: HostPool) -> int:
    foreign: Any = pool
    return int(foreign.head_num)


def _layout(pool: HostPool) -> str:
    return _MARKER_LAYOUT if is_logical(pool) else pool.layout


def _device_order(pool: HostPool) -> str:
    """Return the order of heads and tokens in device and host memory. The usual order is "".

    Environment variables set it: SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT.
    """
    foreign: Any = pool
    order = getattr(getattr(pool, "device_pool", None), "kv_cache_layout", None)
    if infos := getattr(foreign, "_buffer_infos", ()):  # SGLang 0.5.23
        order = getattr(getattr(infos[0].buffers, "layout", None), "value", None)
    return "" if order in (None, "nhd") else str(order)


def is_logical(pool: HostPool) -> bool:
    """Return whether `pool` is a logical anchor, whose slots have no memory."""
    return int(getattr(pool, "size_per_token", 1)) == 0
