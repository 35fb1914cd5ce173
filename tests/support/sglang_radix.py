"""SGLang's `UnifiedRadixCache` with HiCache or with a linker, driven like a scheduler.

with server_world(extra_config):
    with Server() as server:
        server.compute(tokens)
        server.load_prefix(tokens)
"""

from __future__ import annotations

import contextlib
import importlib
import json
from array import array
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any, Self

import sglang_engine
from servers import wait_until
from sglang_engine import PAGE_TOKENS, CacheRequestHandle, PoolPlan, RadixKey, engine_world, named

torch: Any = importlib.import_module("torch")
UnifiedRadixCache = named("mem_cache.unified_radix_cache", "UnifiedRadixCache")
CacheInitParams = named("mem_cache.cache_init_params", "CacheInitParams")
ComponentType = named("mem_cache.unified_cache.component_type", "ComponentType")
InsertParams = named("mem_cache.base_prefix_cache", "InsertParams")
MatchPrefixParams = named("mem_cache.base_prefix_cache", "MatchPrefixParams")
InitLoadBackParams = named("mem_cache.base_prefix_cache", "InitLoadBackParams")
ReqToTokenPool = named("mem_cache.memory_pool", "ReqToTokenPool")
build_full_draft_pools = named(
    "mem_cache.hybrid_cache.hybrid_pool_assembler", "build_full_draft_pools"
)
get_server_args = named("runtime_context", "get_server_args")

SWAKVPool = named("mem_cache.swa_memory_pool", "SWAKVPool")
SWATokenToKVPoolAllocator = named("mem_cache.allocator.swa", "SWATokenToKVPoolAllocator")

SLOTS = 64 * PAGE_TOKENS
WINDOW_PAGES = 2


def as_flag(extra_config: dict[str, Any]) -> str:
    """Return the value of the flag --hicache-storage-backend-extra-config."""
    return json.dumps({**extra_config, "prefetch_threshold": PAGE_TOKENS})


@contextlib.contextmanager
def server_world(
    extra_config: dict[str, Any] | str, *, layout: str = "page_first_direct", **arguments: Any
) -> Generator[None]:
    """Make this process a server with these flags. `extra_config` may be the text of its flag."""
    flag = extra_config if isinstance(extra_config, str) else as_flag(extra_config)
    with engine_world(
        hicache_mem_layout=layout,
        hicache_io_backend="direct",
        hicache_ratio=2.0,
        hicache_write_policy="write_through",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=flag,
        hicache_storage_prefetch_policy="wait_complete",
        served_model_name="org/model",
        **arguments,
    ):
        yield


class Server:
    """L1, L2 and L3 of one rank, with random numbers as KV."""

    def __init__(self, kind: str = "mha", *, draft: PoolPlan | None = None) -> None:
        """Create the caches. `kind` is a kind of `PoolPlan`, or `window` for a sliding window."""
        self.windowed = kind == "window"
        self._attempts = count()
        self.allocator = _windowed_allocator() if self.windowed else _plain_allocator(kind)
        device = self.allocator.get_kvcache()
        self.devices = [device.full_kv_pool if self.windowed else device]
        self.drafts = [] if draft is None else [sglang_engine.pools_of(draft, SLOTS)[1]]
        self.devices += self.drafts
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(
                size=4, max_context_len=SLOTS, device="cpu", enable_memory_saver=False
            ),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE_TOKENS,
            tp_cache_group=torch.distributed.group.WORLD,
            tree_components=(ComponentType.FULL, ComponentType.SWA)[: 1 + self.windowed],
            sliding_window_size=WINDOW_PAGES * PAGE_TOKENS if self.windowed else None,
        )
        self.cache = UnifiedRadixCache(params)
        self._attach(params)

    def _attach(self, params: Any) -> None:
        self.cache.init_hicache(get_server_args(), params)
        for device in self.drafts:
            specs, entries = build_full_draft_pools(draft_kv_pool=device, tree_cache=self.cache)
            for spec, entry in zip(specs, entries, strict=True):
                self.cache.register_sidecar_pool(spec, entry)

    @property
    def storage(self) -> Any:
        return self.cache.cache_controller.storage_backend

    def compute(self, tokens: Sequence[int]) -> list[bytes]:
        """Write random KV into L1, wait until SGLang has stored it in L3, and return its bytes."""
        held = self._insert_random(tokens)
        self._until(lambda: self.storage.batch_exists(self._hashes(tokens)) == self._pages(tokens))
        self._until(lambda: not self.cache.ongoing_backup and not self.cache.ongoing_write_through)
        return held

    def _insert_random(self, tokens: Sequence[int]) -> list[bytes]:
        indices = self._allocated(len(tokens))
        for tensor in self._tensors():
            tensor.view(torch.uint8).random_(0, 256)
        held = self._held(indices)
        self.cache.insert(InsertParams(key=self._key(tokens), value=indices))
        return held

    def load_prefix(self, tokens: Sequence[int]) -> tuple[int, list[bytes]]:
        """Load the prefix of a request from L3 to L1. Return how many tokens L1 has, and their KV."""
        handle = self.begin_prefetch(tokens)
        self._until(lambda: self.cache.check_prefetch_progress(handle))
        matched = self.cache.match_prefix(MatchPrefixParams(key=self._key(tokens)))
        request = SimpleNamespace(
            rid="request",
            kv=SimpleNamespace(mamba_pool_idx=None),
            last_node=matched.last_device_node,
            swa_host_hit_length=matched.swa_host_hit_length,
            mamba_host_hit_length=0,
        )
        self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=matched.best_match_node,
                host_hit_length=matched.host_hit_length,
                req=request,
            )
        )
        self.cache.ready_to_load_host_cache()
        self._until(lambda: not self.cache.ongoing_load_back)
        matched = self.cache.match_prefix(MatchPrefixParams(key=self._key(tokens)))
        indices = self.cache.path_device_indices(matched.last_device_node)
        return len(indices), self._held(indices)

    def begin_prefetch(self, tokens: Sequence[int]) -> Any:
        """Begin the prefetch for a request that waits in the scheduler's queue. Return its handle."""
        matched = self.cache.match_prefix(MatchPrefixParams(key=self._key(tokens)))
        handle = CacheRequestHandle("request", next(self._attempts))
        wanted = array("q", [*tokens, 5])
        self.cache.prefetch_from_storage(handle, matched.last_host_node, wanted)
        return handle

    def close(self) -> None:
        if self.storage is not None:
            self.cache.detach_storage_backend()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _until(self, condition: Callable[[], bool]) -> None:
        def turned() -> bool:
            self.cache.check_hicache_events()
            return condition()

        wait_until(turned)

    def _held(self, indices: Any) -> list[bytes]:
        """Return the KV of these device slots, tensor by tensor; for a window, only its own tokens."""
        held = [_bytes(tensor[indices]) for tensor in _tensors(self.devices)]
        if self.windowed and len(indices):
            window = indices[-WINDOW_PAGES * PAGE_TOKENS :]
            slots = self.allocator.full_to_swa_index_mapping[window]
            device = self.allocator.get_kvcache().swa_kv_pool
            held += [_bytes(tensor[slots]) for tensor in _tensors([device])]
        return held

    def _tensors(self) -> list[Any]:
        windows = [self.allocator.get_kvcache().swa_kv_pool] if self.windowed else []
        return _tensors([*self.devices, *windows])

    def _allocated(self, tokens: int) -> Any:
        if not self.windowed:
            return self.allocator.alloc(tokens)
        # `alloc_extend` does the same in a CUDA kernel.
        full = self.allocator.full_attn_allocator.alloc(tokens)
        window = self.allocator.swa_attn_allocator.alloc(tokens)
        self.allocator.full_to_swa_index_mapping[full] = window
        return full

    @staticmethod
    def _key(tokens: Sequence[int]) -> Any:
        return RadixKey(array("q", tokens))

    @staticmethod
    def _hashes(tokens: Sequence[int]) -> list[str]:
        return sglang_engine.hashes_of(tokens)

    @staticmethod
    def _pages(tokens: Sequence[int]) -> int:
        return len(tokens) // PAGE_TOKENS


@contextlib.contextmanager
def linker_world(
    extra_config: dict[str, Any],
    *,
    layout: str = "page_first_direct",
    hicache_ratio: float = 2.0,
    timeout_s: float | None = 20.0,
    **arguments: Any,
) -> Generator[None]:
    """Make this process a server with a linker, with these flags.

    The linker's own deadline is so short that a busy machine exceeds it. With None, it has that one.
    """
    if timeout_s is not None:
        adapter = {"timeout_s": timeout_s, **extra_config.get("adapter", {})}
        extra_config = {**extra_config, "adapter": adapter}
    with engine_world(
        hicache_mem_layout=layout,
        hicache_io_backend="direct",
        served_model_name="org/model",
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config={
            "linker": "SGLangCacheLinker",
            "linker_module_path": "hicache_storage.integrations.sglang",
            "linker_extra_config": extra_config,
        },
        hicache_ratio=hicache_ratio,
        **arguments,
    ):
        yield


class LinkedServer(Server):
    """L1 and L3 of one rank, with a linker between them."""

    def _attach(self, params: Any) -> None:
        factory = importlib.import_module("sglang.srt.mem_cache.unified_cache.linker_factory")
        self.linker: Any = factory.create_unified_cache_linker(
            get_server_args(),
            replace(params, sidecar_draft_device_pools=tuple(self.drafts)),
            backend="dynamic",
            config=factory.get_startup_linker_config(),
            components=set(self.cache.components),
        )
        self.cache.init_cache_linker(self.linker)
        counter = self.linker.layer_done_counter
        self.allocator.get_kvcache().register_layer_transfer_counter(counter)

    @property
    def storage(self) -> Any:
        return self.linker._adapter

    def compute(self, tokens: Sequence[int]) -> list[bytes]:
        held = self._insert_random(tokens)
        self.offload()
        return held

    def offload(self) -> None:
        """Wait until SGLang has taken the result of each offload."""
        self._until(lambda: not self.cache.linker.pending_offloads)

    def load_prefix(self, tokens: Sequence[int]) -> tuple[int, list[bytes]]:
        request = self.match(tokens)
        self.load(request)
        index = self.cache.ready_to_load_host_cache()
        self.linker.layer_done_counter.set_consumer(index)
        indices = self.cache.path_device_indices(request.last_node)
        loaded = self.cache.linker.private_load_indices.get(request.rid)
        if loaded is not None:
            indices = torch.cat([indices, loaded])
        assert not self.cache.finish_external_linker_loads([request])
        held = self._held(indices)
        if loaded is not None:
            self.cache.insert(InsertParams(key=self._key(tokens), value=indices))
        return len(indices), held

    def match(self, tokens: Sequence[int], rid: str = "request") -> Any:
        """Return a request whose prefix SGLang has looked up in L1 and L3."""
        request = SimpleNamespace(rid=rid, kv=None, session=None, swa_branching_seqlen=None)
        matched = self.cache.match_prefix(MatchPrefixParams(key=self._key(tokens), req=request))
        request.last_node = matched.last_device_node
        request.matched = matched
        request.swa_host_hit_length = request.mamba_host_hit_length = 0
        return request

    def load(self, request: Any) -> int:
        """Return how many tokens SGLang loads for a request, which is put into the next batch."""
        loaded, _ = self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=request.matched.best_match_node,
                host_hit_length=request.matched.host_hit_length,
                req=request,
            )
        )
        return int(loaded)

    def close(self) -> None:
        self.linker.close()


def _plain_allocator(kind: str) -> Any:
    _, device = sglang_engine.pools_of(PoolPlan(kind=kind), SLOTS)
    return sglang_engine.PagedTokenToKVPoolAllocator(
        SLOTS,
        PAGE_TOKENS,
        dtype=torch.bfloat16,
        device="cpu",
        kvcache=device,
        need_sort=False,
    )


def _windowed_allocator() -> Any:
    device = SWAKVPool(
        size=SLOTS,
        size_swa=SLOTS,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=16,
        swa_attention_layer_ids=[1, 2],
        full_attention_layer_ids=[0],
        device="cpu",
    )
    return SWATokenToKVPoolAllocator(
        SLOTS, SLOTS, PAGE_TOKENS, torch.bfloat16, "cpu", device, need_sort=False
    )


def _tensors(devices: Sequence[Any]) -> list[Any]:
    tensors: list[Any] = []
    for device in devices:
        planes = ("k_buffer", "v_buffer") if hasattr(device, "k_buffer") else ("kv_buffer",)
        for plane in planes:
            tensors += getattr(device, plane)
    return tensors


def _bytes(tensor: Any) -> bytes:
    raw: bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return raw
