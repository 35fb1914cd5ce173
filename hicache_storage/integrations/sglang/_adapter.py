"""The SGLang adapter. Its base class is added later, so that this module does not import SGLang."""

from __future__ import annotations

import logging
import os
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from hicache_storage.integrations._backend_choice import BackendChoice, close_all, closed_on_failure
from hicache_storage.integrations._metrics import AdapterMetrics, EngineRegistry
from hicache_storage.integrations._weights import process_started_s
from hicache_storage.integrations._write_admission import WriteAdmission
from hicache_storage.integrations.sglang._arguments import WATCHED
from hicache_storage.integrations.sglang._launch import LaunchIdentity
from hicache_storage.integrations.sglang._pool_table import ANCHOR, PoolTable
from hicache_storage.integrations.sglang._settings import split_config
from hicache_storage.integrations.sglang._transfer_metrics import TransferMetrics
from hicache_storage.integrations.sglang._transport import TransferResult, Transport
from hicache_storage.observers import EventSource, open_observers
from hicache_storage.page_store import PageStore, PageStoreSettings
from hicache_storage.page_store.lookup import HitPolicy, usable_prefix
from hicache_storage.request_log import open_explain_log

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from hicache_storage.integrations.sglang._engine import (
        EngineTypes,
        HostPool,
        Indices,
        PoolTransfer,
        StorageConfig,
    )
    from hicache_storage.integrations.sglang._settings import AdapterSettings
    from hicache_storage.integrations.sglang._stored_pool import StoredPool
    from hicache_storage.metrics import CacheView
    from hicache_storage.page_store import Observer
    from hicache_storage.page_store.lookup import PoolSpec
    from hicache_storage.page_store.results import Match

logger = logging.getLogger(__name__)

_Transfer: TypeAlias = "Callable[[StoredPool, Sequence[str], Indices], TransferResult]"

_NOT_GATING = "block_groups"
"""The hit policy of pools that do not limit the prefix."""


class Adapter:
    """The connection of one rank of SGLang's HiCache to a storage of this project. Thread-safe.

    SGLang calls it from the scheduler, prefetch and backup threads. Once the pools are registered, no
    method raises: a failure of the store is a miss, or False. Page hashes are chained, so the adapter
    ignores `prefix_keys`.
    """

    engine: ClassVar[EngineTypes]

    def __init__(
        self, storage_config: StorageConfig, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Open the storage named in `extra_config`. SGLang's factory passes no `kwargs`.

        Raises:
            ConfigError: A field is invalid; the message names it.
            StorageUnavailable: The store cannot be reached.
        """
        name, settings, fields = split_config(storage_config.extra_config)
        self._pid = os.getpid()
        self._known_overrides = len(self.engine.argument_overrides())
        arguments = self.engine.launch_arguments()
        launch = LaunchIdentity(
            arguments,
            settings,
            self.engine.launch_defaults(),
            self.engine.variables(),
            version=self.engine.version(),
            fp8_type=self.engine.fp8_type,
            loaded_at_s=process_started_s() if _is_attached_later(arguments) else None,
        )
        self._config = storage_config
        self._outdated = False
        self._closed = False
        rank = rank_number(storage_config, self.engine.replica())
        self._explain_log = open_explain_log(settings, engine="sglang", rank=rank)
        self._observers: list[Observer] = []
        try:
            self._observers = open_observers(
                tracing=settings.tracing,
                attributes={"engine": "sglang", "backend": name, "rank": rank},
                events=_event_source(storage_config, settings),
            )
            choice = BackendChoice.of(name, fields, settings.timeout_s)
            self._storage = choice.open()
            self._store = PageStore(
                self._storage,
                PageStoreSettings(
                    checksum=settings.checksum,
                    timeout_s=settings.timeout_s,
                    lookup_timeout_s=settings.timeout_s / 2,
                    parallelism=settings.parallelism,
                    lend_memory=settings.lend_memory,
                ),
                observers=self._observers,
            )
            with closed_on_failure(self._store):
                metrics = TransferMetrics() if storage_config.enable_storage_metrics else None
                self._admission = WriteAdmission(self._store, settings.admission)
                self._transport = Transport(
                    self._store,
                    metrics,
                    settings.timeout_s,
                    self._admission,
                    self._explain_log,
                )
                self._timeout_s = settings.timeout_s
                self._pools = PoolTable(
                    storage_config,
                    launch,
                    settings.tenant,
                    self._transport,
                    self.engine.index_key_order,
                )
                settings.shorten_switch_interval()
                self._errors = 0
                self._metrics = AdapterMetrics(
                    settings,
                    self._view,
                    engine="sglang",
                    backend=name,
                    logger=logger,
                    rank=rank,
                    registry=EngineRegistry.PROCESSES
                    if storage_config.enable_storage_metrics
                    else EngineRegistry.NONE,
                )
        except BaseException:
            self._close_records()
            raise

    # --- pools ---------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Register the anchor pool. SGLang calls this first, before any thread runs.

        Raises:
            ConfigError: The identity of the pages is unknown.
        """
        self.mem_pool_host = mem_pool_host
        self._pools.register(ANCHOR, mem_pool_host)
        self._admission.start(self._pools[ANCHOR].spaces[0])
        if not (self._config.extra_config or {}).get("interface_v1"):
            logger.warning('KV pages are copied once more: set "interface_v1": 1 to avoid it')

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str) -> None:
        """Register a pool by name: the anchor again, a side pool, or later a draft pool.

        Raises:
            ConfigError: The identity of the pages is unknown. The pool then has no hits.
        """
        self._pools.register(_text(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Do nothing, because each pool is complete when it is registered."""

    # --- lookup --------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: object = None) -> int:
        """Return how many leading pages the storage has."""
        if not self._is_outdated():
            with self._caught():
                return self._match(keys, {ANCHOR: self._pools[ANCHOR].specs()}).pages
        return 0

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: object = None,
    ) -> Any:
        """Return the longest prefix that KV and all side pools have, and all shorter usable prefixes."""
        if not self._is_outdated():
            with self._caught():
                return self._match_pools(keys, pool_transfers or [])
        return self.engine.pool_transfer_result(0, {}, [])

    def _match_pools(self, keys: Sequence[str], transfers: Sequence[PoolTransfer]) -> Any:
        pools = {ANCHOR: self._pools[ANCHOR].specs()}
        for transfer in transfers:
            if transfer.hit_policy != _NOT_GATING:
                window = max(1, len(transfer.keys or ()))
                policy = HitPolicy(_text(transfer.hit_policy))
                pools[_text(transfer.name)] = self._pools[transfer.name].specs(policy, window)
        match = self._match(keys, pools)
        rows = iter(match.present)
        ends = {
            name: usable_prefix(parts, [next(rows) for _ in parts]) for name, parts in pools.items()
        }
        restorable = [length for length, usable in enumerate(match.usable) if usable and length]
        reported = {name: end for name, end in ends.items() if end}
        return self.engine.pool_transfer_result(match.pages, reported, restorable)

    def _match(self, keys: Sequence[str], pools: Mapping[str, Sequence[PoolSpec]]) -> Match:
        """Look up a prefix in the parts of several pools, and log the result."""
        began_s = time.monotonic()
        match = self._store.match(keys, [part for parts in pools.values() for part in parts])
        if self._explain_log is not None:
            names = [name for name, parts in pools.items() for _ in parts]
            self._explain_log.add_match(keys, match, names, elapsed_s=time.monotonic() - began_s)
        return match

    # --- in place: pages of the host pools -----------------------------------------------------------

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Indices, extra_info: object = None
    ) -> list[bool]:
        return self._transfer(ANCHOR, keys, host_indices, self._transport.load).moved

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Indices, extra_info: object = None
    ) -> list[bool]:
        return self._transfer(ANCHOR, keys, host_indices, self._transport.save).moved

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: object = None
    ) -> dict[str, list[bool]]:
        return self._transfer_pools(transfers, self._transport.load)

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: object = None
    ) -> dict[str, list[bool]]:
        return self._transfer_pools(transfers, self._transport.save)

    def _transfer_pools(
        self, transfers: Sequence[PoolTransfer], transfer_pages: _Transfer
    ) -> dict[str, list[bool]]:
        """Return the verdicts of each pool. If a pool gets no answer, do not try the pools after it."""
        verdicts: dict[str, list[bool]] = {}
        answered = True
        for transfer in transfers:
            keys = transfer.keys or []
            if answered:
                verdicts[transfer.name], answered = self._transfer(
                    transfer.name, keys, transfer.host_indices, transfer_pages
                )
            else:
                verdicts[transfer.name] = [False] * len(keys)
        return verdicts

    def _transfer(
        self,
        name: str,
        keys: Sequence[str] | None,
        indices: Indices | None,
        transfer_pages: _Transfer,
    ) -> TransferResult:
        """Return a verdict for each key.

        The pages are transferred in batches, each with its own deadline. The first batch without an
        answer ends the call, so the call waits for a hung store at most once.
        """
        hashes = keys or []
        verdicts: list[bool] = []
        answered = True
        if hashes and not self._is_outdated():
            activity = self._store.begin_activity(
                "transfer", {"pool": _text(name), "pages": len(hashes)}
            )
            with activity.resume(), self._caught():
                pool = self._pools[name]
                checked = pool.check_indices(hashes, indices)
                tokens = pool.host.page_size
                for part in _batches(len(hashes), pool.batch_pages):
                    batch = checked[part.start * tokens : part.stop * tokens]
                    moved, answered = transfer_pages(pool, hashes[part], batch)
                    verdicts += moved
                    if not answered:
                        break
            activity.end({"pages.moved": verdicts.count(True)})
        return TransferResult(verdicts + [False] * (len(hashes) - len(verdicts)), answered)

    # --- by copy: flat pages -------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: object = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: Sequence[str],
        target_locations: Sequence[Any] | None = None,
        target_sizes: object = None,
    ) -> list[Any]:
        """Return the tensors that were filled, with None in place of the others."""
        found: list[Any] = []
        if not self._is_outdated():
            with self._caught():
                pool, targets = self._pools[ANCHOR], list(target_locations or ())
                for part in _batches(len(keys), pool.batch_pages):
                    filled, answered = self._transport.load_flat(pool, keys[part], targets[part])
                    found += filled
                    if not answered:
                        break
        return found + [None] * (len(keys) - len(found))

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: Sequence[str],
        values: Sequence[Any] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Return whether all pages were stored."""
        if not self._is_outdated():
            with self._caught():
                pool, given = self._pools[ANCHOR], list(values or ())
                saved = (
                    self._transport.save_flat(pool, keys[part], given[part]).moved
                    for part in _batches(len(keys), pool.batch_pages)
                )
                return all(all(part) for part in saved)  # the first batch that fails ends the call
        return False

    # --- the rest ------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Delete only this rank's pages. Return False if the store cannot list its pages."""
        with self._caught():
            for pool in self._pools.all():
                for space in pool.spaces:
                    self._store.clear(space)
            return True
        return False

    def get_stats(self) -> Any:
        """Return the transfers since the last call, or None if SGLang collects no metrics.

        The call never raises.
        """
        metrics = self._transport.metrics
        if metrics is None or self._closed:
            return None
        with self._caught():
            return metrics.take(self.engine.storage_metrics)
        return None

    def counters(self) -> dict[str, int]:
        """Return the page store's counters, and how many pages were not admitted, by reason."""
        return {**self._store.stats(), **self._admission.stats()}

    def _view(self) -> CacheView:
        from hicache_storage.metrics import CacheView  # noqa: PLC0415 - the extra is optional

        return CacheView(
            store=self._store,
            attached=not (self._outdated or self._closed),
            engine={"adapter_errors": self._errors, **self._admission.stats()},
        )

    def close(self) -> None:
        """Stop the threads and close the storage. Idempotent. Do nothing in a forked child."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        save_sketch = partial(self._admission.close, self._timeout_s)
        parts = (self._pools, self._store, self._storage)
        close_all([self._metrics.close, save_sketch, *(part.close for part in parts)])
        self._close_records()

    def _close_records(self) -> None:
        parts = (*self._observers, self._explain_log)
        close_all(part.close for part in parts if part is not None)

    def _is_outdated(self) -> bool:
        """Return whether SGLang has changed its weights or their version since the attach.

        The key spaces name the weights of the attach, so pages of new weights would be mixed up with the
        old ones. Return True also in a forked child, because the threads that a call needs do not exist
        there.
        """
        if self._outdated or self._pid != os.getpid():
            return True
        overrides = self.engine.argument_overrides()
        # SGLang starts a new list when it publishes its arguments again.
        known = self._known_overrides if len(overrides) >= self._known_overrides else 0
        for fields in overrides[known:]:
            if changed := WATCHED.intersection(fields):
                self._outdated = True
                logger.error(
                    "SGLang has changed %s, but the pages in the storage belong to the former state,"
                    " so this storage is no longer read or written. Detach the storage, and"
                    " attach it again",
                    ", ".join(sorted(changed)),
                )
        return self._outdated

    @contextmanager
    def _caught(self) -> Generator[None]:
        """Log an exception of the `with` block, and end the block without a result.

        The exception would end SGLang's scheduler, and some exceptions would end its storage threads.
        """
        try:
            yield
        except Exception:
            if not self._closed:
                self._errors += 1
                logger.exception("a storage call of SGLang failed, and the result is a miss")


def _is_attached_later(arguments: Mapping[str, Any]) -> bool:
    """Return whether a running server attaches the storage. SGLang notes that in its arguments later."""
    at_start = ("hicache_storage_backend", "enable_unified_cache_external_linker")
    return bool(arguments) and not any(arguments.get(name) for name in at_start)


def rank_number(config: StorageConfig, replica: int) -> int:
    """Return the number of this process among the engine's processes, counted from 0."""
    number = getattr(config, "dp_rank", 0) or replica
    for rank, size in (
        (config.pp_rank, config.pp_size),
        (config.attn_cp_rank, config.attn_cp_size),
        (config.tp_rank, config.tp_size),
    ):
        number = number * size + rank
    return number


def _event_source(config: StorageConfig, settings: AdapterSettings) -> EventSource | None:
    """Return the KV events of this rank. Only the first rank of each replica has events."""
    if settings.events is None or config.tp_rank or config.pp_rank or config.attn_cp_rank:
        return None
    return EventSource(
        settings=settings.events,
        announces=lambda space: space.pool == ANCHOR,
        hash_format="int64",
        rank=getattr(config, "dp_rank", 0),
    )


def _batches(pages: int, step: int) -> Iterator[slice]:
    return (slice(n, min(n + step, pages)) for n in range(0, pages, step))


def _text(name: str) -> str:
    """Return the value of one of SGLang's string enums. Return a plain string as it is."""
    return str(getattr(name, "value", name))
