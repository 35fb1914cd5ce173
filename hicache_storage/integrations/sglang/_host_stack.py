"""SGLang's own host pools and the copies between device and host, for an engine without a host cache.

They are HiCache's, so a linker supports the same pools and layouts, and its pages are HiCache's pages.
This module imports SGLang when a `HostStack` is made.
"""

from __future__ import annotations

import importlib
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hicache_storage.integrations.sglang._engine import Indices

_ASSEMBLER = "mem_cache.hybrid_cache.hybrid_pool_assembler"


class Copy(NamedTuple):
    """A copy between device and host that SGLang has queued in a stream."""

    host_indices: Indices
    finished: Any
    """The event of the stream after the copy."""


class HostStack:
    """The host memory of one rank. All calls but `free` belong to the scheduler's thread."""

    def __init__(self, params: Any, components: Collection[Any], forward_stream: Any) -> None:
        """Map the host memory that SGLang's flags for HiCache ask for.

        Raises:
            ConfigError: The model has a state besides the KV of full attention, or pipeline stages.
        """
        others = sorted(component.name for component in components if component.name != "FULL")
        if others or params.pp_size > 1:
            raise ConfigError(
                "sglang: the linker supports models whose only state is the KV of full attention,"
                f" without pipeline parallelism, not {', '.join(others) or 'several stages'}: use"
                " --enable-hierarchical-cache with SGLangHiCacheStorage for this model"
            )
        assembler = sglang_module(_ASSEMBLER)
        kv_cache = params.token_to_kv_pool_allocator.get_kvcache()
        strategy = assembler._select_strategy(kv_cache, set(components))  # noqa: SLF001 - no public way
        built = strategy.build(
            cache=None,  # only strategies with other components use it
            kvcache=kv_cache,
            params=params,
            server_args=None,
            load_cache_event=threading.Event(),
            enable_storage_metrics=params.enable_metrics,
        )
        self._params = params
        self.controller = built.cache_controller
        side_pools = [spec.pool_name for spec in built.sidecars]
        if drafts := params.sidecar_draft_device_pools:
            specs, entries = assembler.build_hicache_draft_sidecars(
                draft_device_pools=drafts,
                tree_cache=SimpleNamespace(cache_controller=self.controller),
            )
            side_pools += [spec.pool_name for spec in specs]
            for entry in entries:
                self.controller.register_host_pool_entry(entry)
        self._side_pools = side_pools
        self.controller.load_fence_stream = forward_stream
        self.controller.write_fence_stream = forward_stream
        self._transfer = sglang_module("mem_cache.hicache_storage").PoolTransfer
        self._operation = sglang_module("managers.cache_controller").CacheOperation

    @property
    def pools(self) -> Mapping[Any, Any]:
        """The pools with their host memory, by SGLang's names. The first one is the anchor."""
        pools: Mapping[Any, Any] = self.controller.mem_pool_host.entry_map
        return pools

    def storage_config(self, extra_config: Mapping[str, Any]) -> Any:
        """Return what SGLang would give to a storage of HiCache on this rank."""
        name = sglang_module("runtime_context").get_serving().served_model_name
        return self.controller._generate_storage_config(name, dict(extra_config))  # noqa: SLF001 - as above

    def side_transfers(self, keys: Sequence[str], host_indices: Indices | None = None) -> list[Any]:
        """Return the transfers of the pools that follow KV, which are drafts and index keys."""
        return [
            self._transfer(name=name, keys=keys, host_indices=host_indices)
            for name in self._side_pools
        ]

    def transfers(self, keys: Sequence[str], host_indices: Indices) -> list[Any]:
        """Return the transfers of all pools between host and storage, those of KV last."""
        anchor = self.controller.mem_pool_host.anchor_entry.name
        kv = self._transfer(name=anchor, keys=keys, host_indices=host_indices)
        return [*self.side_transfers(keys, host_indices), kv]

    def page_indices(self, host_indices: Indices, first: int) -> Indices:
        """Return the indices of all pages from number `first` on."""
        return host_indices[first * self._params.page_size :]

    def allocate(self, pages: int) -> Indices | None:
        """Return host slots for pages, or None if too few are free."""
        slots: Indices | None = self.controller.mem_pool_host.alloc(pages * self._params.page_size)
        return slots

    def free(self, host_indices: Indices) -> None:
        """Give host slots back. Any thread may call it."""
        self.controller.mem_pool_host.free(host_indices)

    def copy_to_host(self, device_indices: Indices) -> Copy | None:
        """Queue the copy of pages to new host slots. Return None if too few are free."""
        followers = [self._follower(name) for name in self._side_pools]
        indices = self.controller.write(device_indices, extra_pools=followers or None)
        if indices is None:
            return None
        return Copy(indices, self.controller.ack_write_queue.pop().finish_event)

    def copy_to_device(self, copies: Sequence[tuple[Indices, Indices]]) -> tuple[int, Any]:
        """Queue the copy of pages, layer by layer, from host slots to device slots.

        Return the index of the layer counter, which the forward waits for, and the event of the end.
        """
        for host, device in copies:
            followers = [
                self._follower(name, host_indices=host, device_indices=device)
                for name in self._side_pools
            ]
            operation = self._operation(host, device, -1, pool_transfers=followers or None)
            self.controller.load_queue.append(operation)
        index: int = self.controller.start_loading()
        return index, self.controller.ack_load_queue.pop().finish_event

    def all_have(self, own: object) -> bool:
        """Return True if no rank has None. All ranks must call it together."""
        torch: Any = importlib.import_module("torch")
        ranks = torch.distributed
        params = self._params
        groups = [
            group
            for group in (params.attn_cp_cache_group, params.attn_tp_cache_group)
            if group is not None and ranks.get_world_size(group=group) > 1
        ]
        vote = torch.tensor([int(own is not None)], dtype=torch.int)
        for group in groups or [params.tp_cache_group]:
            ranks.all_reduce(vote, op=ranks.ReduceOp.MIN, group=group)
        return bool(vote.item())

    def reset(self) -> None:
        """Free all host slots. No copy may be under way."""
        self.controller.mem_pool_host.clear()
        self.controller.layer_done_counter.reset()

    def close(self) -> None:
        """Unpin the host memory. Nothing may use it any more."""
        self.controller.mem_pool_host.destroy()

    def _follower(self, name: Any, **indices: Indices) -> Any:
        """Return the transfer of a pool whose slots are those of KV."""
        anchor = self.controller.mem_pool_host.anchor_entry.name
        return self._transfer(name=name, indices_from_pool=anchor, **indices)


def sglang_module(name: str) -> Any:
    """Import a module of SGLang's runtime."""
    return importlib.import_module(f"sglang.srt.{name}")
