"""SGLang's own host pools and cache controller for one rank, small enough for a test.

with engine_world(), Engine([PoolPlan()], extra_config) as engine:
    engine.write(tokens)
    assert engine.read(tokens) == pages
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import sglang_cpu

sglang_cpu.stand_in()

torch: Any = importlib.import_module("torch")


def named(module: str, name: str) -> Any:
    """Import a name of SGLang's runtime."""
    return getattr(importlib.import_module(f"sglang.srt.{module}"), name)


PagedTokenToKVPoolAllocator = named("mem_cache.allocator", "PagedTokenToKVPoolAllocator")
CacheRequestHandle = named("mem_cache.base_prefix_cache", "CacheRequestHandle")
PoolHitPolicy = named("mem_cache.hicache_storage", "PoolHitPolicy")
PoolName = named("mem_cache.hicache_storage", "PoolName")
PoolTransfer = named("mem_cache.hicache_storage", "PoolTransfer")
HybridCacheController = named(
    "mem_cache.hybrid_cache.hybrid_cache_controller", "HybridCacheController"
)
MHATokenToKVPool = named("mem_cache.memory_pool", "MHATokenToKVPool")
MLATokenToKVPool = named("mem_cache.memory_pool", "MLATokenToKVPool")
LogicalHostPool = named("mem_cache.memory_pool_host", "LogicalHostPool")
HostPoolGroup = named("mem_cache.pool_host.group", "HostPoolGroup")
PoolEntry = named("mem_cache.pool_host.group", "PoolEntry")
get_mha_host_pool_cls = named("mem_cache.pool_host.mha", "get_mha_host_pool_cls")
MLATokenToKVPoolHost = named("mem_cache.pool_host.mla", "MLATokenToKVPoolHost")
RadixKey = named("mem_cache.radix_cache", "RadixKey")
get_storage_hash_str = named("mem_cache.utils", "get_storage_hash_str")
get_context = named("runtime_context", "get_context")
get_parallel = named("runtime_context", "get_parallel")

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

PAGE_TOKENS = 4
LIMIT_S = 30.0
_attempts = iter(range(1 << 30))


@contextlib.contextmanager
def engine_world(
    *, tp_rank: int = 0, tp_size: int = 1, pp_rank: int = 0, pp_size: int = 1, **arguments: Any
) -> Generator[None]:
    """Make this process a rank of a server that was started with these arguments.

    Collectives run over a group of only one rank, so tests here can't show how ranks agree.
    """
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        hashes_of([0])  # the first call compiles SGLang's hashing, outside a test's time limit
    place = {"tp_rank": tp_rank, "tp_size": tp_size, "pp_rank": pp_rank, "pp_size": pp_size}
    place |= {"attn_tp_rank": tp_rank, "attn_tp_size": tp_size, "moe_tp_size": tp_size}
    with (
        get_context().override_server_args(**arguments),
        get_parallel().override(**place, attn_dcp_rank=0),
    ):
        yield


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """One pool of an engine."""

    name: Any = PoolName.KV
    kind: str = "mha"
    """The kind: mha, mla, asymmetric (K and V of two widths), or logical (slots without memory)."""
    layout: str = "page_first"
    heads: int = 2
    head_dim: int = 16
    latent: tuple[int, int] = (24, 8)
    """`kv_lora_rank` and the rope dims of an mla pool."""
    layers: int = 3
    dtype: str = "bfloat16"
    start_layer: int = 0
    slots_of_its_own: bool = False
    """True for a sliding window, whose pages are in other slots than those of the KV pool."""


class Engine:
    """One rank: SGLang's host pools and its `HybridCacheController`, with all threads."""

    def __init__(
        self,
        plans: Sequence[PoolPlan],
        extra_config: dict[str, Any],
        *,
        model: str = "org/model",
        backend: str = "dynamic",
        late: Sequence[PoolPlan] = (),
        pages: int = 64,
        page_tokens: int = PAGE_TOKENS,
        metrics: bool = False,
    ) -> None:
        self.page_tokens = page_tokens
        self.tokens = pages * page_tokens
        self.entries = {plan.name: self.entry(plan) for plan in plans}
        anchor = self.entries[PoolName.KV]
        allocator = PagedTokenToKVPoolAllocator(
            self.tokens,
            self.page_tokens,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=anchor.device_pool,
            need_sort=False,
        )
        self.controller = HybridCacheController(
            allocator,
            HostPoolGroup(list(self.entries.values())),
            self.page_tokens,
            torch.distributed.group.WORLD,
            load_cache_event=threading.Event(),
            write_policy="write_through",
            io_backend="direct",
            storage_backend=backend,
            prefetch_threshold=self.page_tokens,
            model_name=model,
            storage_backend_extra_config=dict(extra_config),
            enable_storage_metrics=metrics,
        )
        self.plans = [*plans, *late]
        for plan in late:  # SGLang registers draft pools after the attach
            self.entries[plan.name] = self.entry(plan)
            self.controller.register_host_pool_entry(self.entries[plan.name])

    @property
    def storage(self) -> Any:
        """The adapter that SGLang's factory has created."""
        return self.controller.storage_backend

    def host(self, name: Any = PoolName.KV) -> Any:
        return self.entries[name].host_pool

    def fill(self, seed: int = 0) -> None:
        """Fill every host page with random bytes."""
        generator = torch.Generator().manual_seed(seed)
        for entry in self.entries.values():
            for tensor in tensors_of(entry.host_pool):
                raw = tensor.view(torch.uint8)
                noise = torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator)
                raw.copy_(noise)

    def wipe(self) -> None:
        for entry in self.entries.values():
            for tensor in tensors_of(entry.host_pool):
                tensor.zero_()

    def write(
        self, tokens: Sequence[int], window_pages: int = 2, *, compare: bool = True
    ) -> Written:
        """Back up a node with these tokens, as SGLang does after a prefill."""
        hashes = hashes_of(tokens, self.page_tokens)
        indices = self.host().alloc(len(hashes) * self.page_tokens)
        places = {PoolName.KV: indices}
        sides = self._sides(window_pages)
        for side in sides:
            if side.indices_from_pool is None:
                window = hashes[-window_pages:]
                places[side.name] = self.host(side.name).alloc(len(window) * self.page_tokens)
                side.keys, side.host_indices = window, places[side.name]
            else:
                places[side.name] = indices
        held = {name: self.bytes_at(name, place) for name, place in places.items() if compare}
        self.controller.write_storage(indices, list(tokens), hashes, extra_pools=sides or None)
        operation = self.controller.ack_backup_queue.get(timeout=LIMIT_S)
        return Written(
            hashes, places, held, operation.completed_tokens // self.page_tokens, operation
        )

    def read(self, tokens: Sequence[int], window_pages: int = 2, *, compare: bool = True) -> Read:
        """Prefetch these tokens into fresh host pages, as SGLang does for a request."""
        sides = self._sides(window_pages)
        for side in sides:
            if side.indices_from_pool is None:
                side.keys = ["__placeholder__"] * window_pages
        handle = CacheRequestHandle("request", next(_attempts))
        self.controller.prefetch(handle, RadixKey(list(tokens)), extra_pools=sides or None)
        operation = self.controller.prefetch_hit_queue.get(timeout=LIMIT_S)
        hits = operation.storage_hit_count // self.page_tokens
        if not hits:
            return Read(0, 0, {}, operation)
        operation.host_indices = self.host().alloc(hits * self.page_tokens)
        places = {PoolName.KV: operation.host_indices}
        for side in sides:
            if side.indices_from_pool is None:
                count = min(hits, window_pages)
                side.host_indices = self.host(side.name).alloc(count * self.page_tokens)
                places[side.name] = side.host_indices
            else:
                places[side.name] = operation.host_indices
        self.controller.prefetch_buffer.put(operation)
        done = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=LIMIT_S)
            if ack.completed_tokens is not None:
                done = ack.completed_tokens // self.page_tokens
            if ack.completed_req:
                break
        return Read(
            hits,
            done,
            {name: self.bytes_at(name, at) for name, at in places.items() if compare},
            operation,
        )

    def bytes_at(self, name: Any, indices: Any) -> list[bytes]:
        """Return the bytes of each page, in any layout."""
        pool = self.host(name)
        starts = indices.tolist()[:: self.page_tokens]
        return [page_bytes(pool, start, self.page_tokens) for start in starts]

    def close(self) -> None:
        if self.controller.storage_backend is not None:
            self.controller.detach_storage_backend()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _sides(self, window_pages: int) -> list[Any]:
        sides: list[Any] = []
        for plan in self.plans:
            if plan.name == PoolName.KV:
                continue
            policy = (
                PoolHitPolicy.TRAILING_PAGES if plan.slots_of_its_own else PoolHitPolicy.ALL_PAGES
            )
            source = None if plan.slots_of_its_own else PoolName.KV
            sides.append(PoolTransfer(plan.name, hit_policy=policy, indices_from_pool=source))
        return sides

    def entry(self, plan: PoolPlan) -> Any:
        host, device = pools_of(plan, self.tokens, self.page_tokens)
        return PoolEntry(
            name=plan.name,
            host_pool=host,
            device_pool=device,
            layer_mapper=_first_layers(plan.layers),
            is_primary_index_anchor=plan.name == PoolName.KV,
        )


@dataclass(frozen=True)
class Written:
    hashes: list[str]
    places: dict[Any, Any]
    held: dict[Any, list[bytes]]
    pages: int
    """How many KV pages SGLang counts as stored."""
    operation: Any = field(repr=False)


@dataclass(frozen=True)
class Read:
    hits: int
    """How many pages the lookup found."""
    pages: int
    """How many pages were loaded."""
    held: dict[Any, list[bytes]]
    operation: Any = field(repr=False)


def tensors_of(pool: Any) -> list[Any]:
    buffer = pool.kv_buffer
    if buffer is None:
        return []
    return [*buffer] if isinstance(buffer, (list, tuple)) else [buffer]


def page_bytes(pool: Any, start: int, page_tokens: int) -> bytes:
    """Return a host page by plain indexing, without the pool's own page functions."""
    page = start // page_tokens
    parts: list[bytes] = []
    for tensor in tensors_of(pool):
        planes_axis = tensor is pool.kv_buffer and not hasattr(pool, "kv_lora_rank")
        token_axis = planes_axis + (pool.layout == "layer_first")
        if pool.layout in ("page_first_direct", "page_head"):
            part = tensor.narrow(token_axis, page, 1)
        else:
            part = tensor.narrow(token_axis, start, page_tokens)
        parts.append(part.contiguous().view(torch.uint8).numpy().tobytes())
    return b"".join(parts)


def _first_layers(layers: int) -> Any:
    def mapped(layer: int) -> int | None:
        return layer if layer < layers else None

    return mapped


def hashes_of(tokens: Sequence[int], page_tokens: int = PAGE_TOKENS) -> list[str]:
    """Return SGLang's own page hashes."""
    return list(get_storage_hash_str(list(tokens), None, page_size=page_tokens))


def pools_of(plan: PoolPlan, tokens: int, page_tokens: int = PAGE_TOKENS) -> tuple[Any, Any]:
    """Return the host pool and the device pool of a plan."""
    if plan.kind == "logical":
        _, device = pools_of(replace(plan, kind="mla"), tokens, page_tokens)
        return LogicalHostPool(2 * tokens, page_tokens, plan.layout), device
    common: dict[str, Any] = {
        "size": tokens,
        "page_size": page_tokens,
        "dtype": getattr(torch, plan.dtype),
        "layer_num": plan.layers,
        "device": "cpu",
        "enable_memory_saver": False,
        "start_layer": plan.start_layer,
        "end_layer": plan.start_layer + plan.layers,
    }
    if plan.kind == "mla":
        device = MLATokenToKVPool(
            kv_lora_rank=plan.latent[0], qk_rope_head_dim=plan.latent[1], **common
        )
    else:
        wide = {"v_head_dim": 8} if plan.kind == "asymmetric" else {}
        device = MHATokenToKVPool(head_num=plan.heads, head_dim=plan.head_dim, **common, **wide)
    options: dict[str, Any] = {
        "host_to_device_ratio": 2.0,
        "host_size": 0,
        "page_size": page_tokens,
        "layout": plan.layout,
    }
    if plan.kind == "mla":
        options["override_kv_cache_dim"] = device.kv_cache_dim
    if not hasattr(device, "get_device_pool_infos"):  # in 0.5.22 a host pool takes the device pool
        mha = get_mha_host_pool_cls(device) if plan.kind != "mla" else None
        return (mha or MLATokenToKVPoolHost)(device, **options), device
    info = device.get_device_pool_infos()[0].buffer_info
    options |= {
        "device_capacity_tokens": tokens,
        "start_layer": device.start_layer,
        "end_layer": device.end_layer,
    }
    if plan.kind == "mla":
        return MLATokenToKVPoolHost(info, **options, target_layer_num=device.layer_num), device
    return get_mha_host_pool_cls(info)(info, **options), device


TOKENS = list(range(1000, 1000 + 8 * PAGE_TOKENS))
MORE = [*TOKENS, *[7] * PAGE_TOKENS]
DRAFT = PoolPlan(name=PoolName.DRAFT, layers=1, heads=1)
WINDOW = PoolPlan(name=PoolName.SWA, layers=2, slots_of_its_own=True)


def write_and_read(writer: Engine, reader: Engine) -> None:
    """Back up pages with one engine, prefetch them with another, and compare every byte."""
    writer.fill(1)
    written = writer.write(TOKENS)
    assert written.pages == 8

    reader.wipe()
    read = reader.read(MORE)
    assert (read.hits, read.pages) == (8, 8)
    assert {
        name: pages[-len(read.held[name]) :] for name, pages in written.held.items()
    } == read.held
