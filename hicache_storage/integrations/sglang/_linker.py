"""The linker for SGLang's `UnifiedRadixCache`. Its base class is added later, as the adapter's is."""

from __future__ import annotations

import logging
import queue
import threading
import time
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, cast

from hicache_storage.integrations._backend_choice import close_all
from hicache_storage.integrations.sglang._host_stack import HostStack

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from hicache_storage.integrations.sglang._adapter import Adapter
    from hicache_storage.integrations.sglang._engine import Indices
    from hicache_storage.integrations.sglang._host_stack import Copy

logger = logging.getLogger(__name__)

_TIMEOUT_S = 1.0
"""The default deadline of a storage call. It is short, because SGLang's scheduler waits for loads."""
_KEPT_S = 1.0
"""How long the answer of a lookup is used, because SGLang repeats it for each request that waits."""

_MAX_LOADED = 1 << 16
"""How many hashes of loaded pages are remembered, because SGLang also offloads what it has loaded."""

_Offload: TypeAlias = "tuple[Sequence[str], Copy | None]"


class _Lookup(NamedTuple):
    rid: str
    keys: Sequence[str]
    lengths: list[int]
    until_s: float


class Linker:
    """The connection of one rank of SGLang's radix cache to a storage, without a cache in host memory.

    SGLang calls it from the scheduler's thread. A load reads and checks the pages before it returns, so
    SGLang gets only whole prefixes, and then copies them to the device layer by layer while the forward
    runs. Offloads are written by one thread. The storage, its pages and its settings are those of
    `SGLangHiCacheStorage`. After the start, nothing that the store does raises an exception.
    """

    storage_class: ClassVar[Callable[[Any], Adapter]]

    def __init__(
        self,
        server_args: object,
        params: Any,
        *,
        components: Collection[Any],
        extra_config: Mapping[str, Any],
        forward_stream: Any = None,
    ) -> None:
        """Map the host memory, and open the storage named in `extra_config`.

        Raises:
            ConfigError: A field is invalid, or the model is not supported; the message names it.
            StorageUnavailable: The store cannot be reached.
        """
        self.forward_stream = forward_stream
        self._host = HostStack(params, components, forward_stream)
        self._config = self._host.storage_config({**_with_timeout(extra_config), "interface_v1": 1})
        self._adapter = type(self).storage_class(self._config)
        try:
            for name, entry in self._host.pools.items():
                if entry.is_primary_index_anchor:
                    self._adapter.register_mem_pool_host(entry.host_pool)
                self._adapter.register_mem_host_pool_v2(entry.host_pool, name)
        except BaseException:
            self._adapter.close()
            raise
        self.pools: Mapping[Any, Any] = self._host.pools
        self.layer_done_counter: Any = self._host.controller.layer_done_counter
        self._lookups: dict[str, _Lookup] = {}
        self._loaded: set[str] = set()
        self._queued: dict[str, tuple[Indices, Indices]] = {}
        self._loading: dict[int, tuple[Sequence[Indices], Any]] = {}
        self._offloads: queue.Queue[_Offload | None] = queue.Queue()
        self._results: queue.Queue[bool] = queue.Queue()
        self._gives_up = False
        self._thread = threading.Thread(target=self._work, name="hicache-offload", daemon=True)
        self._thread.start()

    # --- load ----------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Return all lengths of the prefix that the storage has in all pools, in pages."""
        keys, now_s = transfers[0].keys, time.monotonic()
        while self._lookups and (oldest := next(iter(self._lookups.values()))).until_s <= now_s:
            del self._lookups[oldest.rid]
        kept = self._lookups.get(rid)
        if kept is None or kept.keys != keys:
            found = self._adapter.batch_exists_v2(keys, self._host.side_transfers(keys))
            self._loaded.difference_update(keys[found.kv_hit_pages :])
            kept = _Lookup(rid, keys, list(found.restorable_prefix_pages), now_s + _KEPT_S)
            self._lookups.pop(rid, None)  # so that the oldest one stays the first one
            self._lookups[rid] = kept
        return kept.lengths

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        """Read pages into host memory. Return False, on all ranks, if one rank lacks a page."""
        (kv,) = transfers
        self._lookups.pop(rid, None)
        slots = self._read(kv.keys)
        if not self._host.all_have(slots):
            if slots is not None:
                self._host.free(slots)
            self._loaded.difference_update(kv.keys)
            return False
        assert slots is not None
        self._queued[rid] = slots, kv.device_indices
        if len(self._loaded) > _MAX_LOADED:
            self._loaded.clear()
        self._loaded.update(kv.keys)
        return True

    def _read(self, keys: Sequence[str]) -> Indices | None:
        """Return the host slots of the pages, or None if a page is missing or there is no room."""
        slots = self._host.allocate(len(keys))
        if slots is None:
            logger.warning("host memory has no room to load %d pages now", len(keys))
            return None
        verdicts = self._adapter.batch_get_v2(self._host.transfers(keys, slots))
        if all(all(of_pool) for of_pool in verdicts.values()):
            return slots
        self._host.free(slots)
        return None

    def cancel_queued_load(self, rid: str) -> bool:
        """Free the pages of a request whose copy has not begun."""
        queued = self._queued.pop(rid, None)
        if queued is not None:
            self._host.free(queued[0])
        return queued is not None

    def start_layer_wise_loading(self) -> int:
        """Begin to copy all loaded pages to the device, layer by layer."""
        if not self._queued:
            return -1
        copies = list(self._queued.values())
        self._queued.clear()
        index, finished = self._host.copy_to_device(copies)
        self._loading[index] = [slots for slots, _ in copies], finished
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait for the end of the copies. They cannot fail, because the pages were checked before."""
        all_slots, finished = self._loading.pop(counter_index, ((), None))
        if finished is not None:
            finished.synchronize()
        for slots in all_slots:
            self._host.free(slots)
        return True

    # --- offload -------------------------------------------------------------------------------------

    def offload(self, transfers: Sequence[Any], session_id: str | None = None) -> bool:
        """Copy pages to host memory, and write them later.

        Return True in any case, because all ranks must accept the same offloads. If there is no room,
        the result is False.
        """
        (kv,) = transfers
        known = sum(1 for _ in takewhile(self._loaded.__contains__, kv.keys))
        keys = list(kv.keys[known:])
        indices = self._host.page_indices(kv.device_indices, known)
        self._offloads.put((keys, self._host.copy_to_host(indices) if keys else None))
        return True

    def num_completed_offloads(self) -> int:
        """Return the number of results that wait."""
        return self._results.qsize()

    def pop_completed_offload(self) -> bool:
        """Return whether the pages of the oldest offload are stored."""
        return self._results.get_nowait()

    def _work(self) -> None:
        while (offload := self._offloads.get()) is not None:
            stored = False
            try:
                stored = self._write(*offload)
            except Exception:
                logger.exception("an offload failed, and its pages are not stored")
            self._results.put(stored)
            self._offloads.task_done()
        self._offloads.task_done()

    def _write(self, keys: Sequence[str], copy: Copy | None) -> bool:
        if copy is None:
            return not keys
        try:
            copy.finished.synchronize()
            if self._gives_up:
                return False
            if not self._config.is_storage_writer:
                return True  # the rank that writes these pages has a result of its own
            found = self._adapter.batch_exists_v2(
                keys, self._host.side_transfers(keys)
            ).kv_hit_pages
            left = self._host.page_indices(copy.host_indices, found)
            verdicts = self._adapter.batch_set_v2(self._host.transfers(keys[found:], left))
            return all(all(of_pool) for of_pool in verdicts.values())
        finally:
            self._host.free(copy.host_indices)

    # --- end -----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop what is queued, wait for the write that is under way, and forget all requests."""
        self._gives_up = True
        self._offloads.join()
        self._gives_up = False
        for index in list(self._loading):
            self.finish_layer_wise_loading(index)
        self._results = queue.Queue()
        self._lookups.clear()
        self._loaded.clear()
        self._queued.clear()
        self._host.reset()

    def close(self) -> None:
        """Drop what is queued, and close the storage. Idempotent."""
        if not self._thread.is_alive():
            return
        self._offloads.put(None)
        self.reset()
        self._thread.join()
        close_all([self._adapter.close, self._host.close])


def _with_timeout(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the linker's own default of `adapter.timeout_s`."""
    adapter: Any = extra_config.get("adapter", {})
    if isinstance(adapter, dict):
        adapter = {"timeout_s": _TIMEOUT_S, **cast("dict[str, Any]", adapter)}
    return {**extra_config, "adapter": adapter}
