"""Everything of the adapter that does not need SGLang to be installed."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from hicache_storage.integrations.sglang._arguments import WATCHED
from hicache_storage.integrations.sglang._launch import Launch
from hicache_storage.integrations.sglang._pool_table import ANCHOR, PoolTable
from hicache_storage.integrations.sglang._settings import split_config
from hicache_storage.integrations.sglang._transfer_metrics import TransferMetrics
from hicache_storage.integrations.sglang._transport import Moved, Transport
from hicache_storage.page_store import PageStore, PageStoreSettings
from hicache_storage.page_store.lookup import HitPolicy, usable_prefix
from hicache_storage.registry import open_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hicache_storage.integrations.sglang._engine import (
        EngineTypes,
        HostPool,
        Indices,
        PoolTransfer,
        StorageConfig,
    )
    from hicache_storage.integrations.sglang._stored_pool import StoredPool

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Move: TypeAlias = "Callable[[StoredPool, Sequence[str], Indices], Moved]"

_NOT_GATING = "block_groups"


class Adapter:
    """One rank's way from SGLang's HiCache to any storage of ours.

    Called by the scheduler and by the prefetch and backup threads at once. Whatever a store does is a
    miss, or False: once the pools are registered no method raises. Page hashes are chained, so
    `prefix_keys` add nothing to them and are not looked at.
    """

    engine: ClassVar[EngineTypes]

    def __init__(
        self, storage_config: StorageConfig, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Open the storage that `extra_config` names. `kwargs` is what SGLang's factory adds: nothing.

        Raises:
            ConfigError: A field is wrong; the message names it.
            StorageUnavailable: The store cannot be reached.
        """
        name, settings, fields = split_config(storage_config.extra_config)
        self._pid = os.getpid()
        self._overridden = len(self.engine.later_arguments())
        launch = Launch(self.engine.launch_arguments(), settings, self.engine.launch_defaults())
        self._config = storage_config
        self._outdated = False
        self._closed = False
        self._storage = open_storage(name, fields)
        self._store = PageStore(
            self._storage,
            PageStoreSettings(
                checksum=settings.checksum,
                timeout_s=settings.timeout_s,
                parallelism=settings.parallelism,
            ),
        )
        traffic = TransferMetrics() if storage_config.enable_storage_metrics else None
        self._transport = Transport(self._store, traffic, settings.timeout_s)
        self._pools = PoolTable(storage_config, launch, settings.tenant, self._transport)

    # --- pools ---------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """The anchor pool: first of all, before any thread runs.

        Raises:
            ConfigError: The identity of its pages cannot be told.
        """
        self.mem_pool_host = mem_pool_host
        self._pools.register(ANCHOR, mem_pool_host)
        if not (self._config.extra_config or {}).get("interface_v1"):
            logger.warning('KV is copied on its way: "interface_v1": 1 moves it in place')

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str) -> None:
        """A pool by name: the anchor once more, side pools, and draft pools long after the others.

        Raises:
            ConfigError: The identity of its pages cannot be told. Such a pool has no hits.
        """
        self._pools.register(_text(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Nothing is left to do."""

    # --- does it exist -------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: object = None) -> int:
        """How many leading pages are there."""
        asked = self._answer(lambda: self._store.match(keys, self._pools[ANCHOR].asked()), None)
        return asked.pages if asked else 0

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: object = None,
    ) -> Any:
        """The longest prefix that KV and every side pool have, and each shorter one that they have."""
        none = self.engine.pool_transfer_result(0, {}, [])
        return self._answer(lambda: self._usable(keys, pool_transfers or []), none)

    def _usable(self, keys: Sequence[str], transfers: Sequence[PoolTransfer]) -> Any:
        pools = {ANCHOR: self._pools[ANCHOR].asked()}
        for transfer in transfers:
            if transfer.hit_policy != _NOT_GATING:
                window = max(1, len(transfer.keys or ()))
                policy = HitPolicy(_text(transfer.hit_policy))
                pools[_text(transfer.name)] = self._pools[transfer.name].asked(policy, window)
        match = self._store.match(keys, [part for parts in pools.values() for part in parts])
        rows = iter(match.present)
        ends = {
            name: usable_prefix(parts, [next(rows) for _ in parts]) for name, parts in pools.items()
        }
        restorable = [length for length, usable in enumerate(match.usable) if usable and length]
        reported = {name: end for name, end in ends.items() if end}
        return self.engine.pool_transfer_result(match.pages, reported, restorable)

    # --- in place: pages of the host pools -----------------------------------------------------------

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Indices, extra_info: object = None
    ) -> list[bool]:
        return self._moved(ANCHOR, keys, host_indices, self._transport.load).whole

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Indices, extra_info: object = None
    ) -> list[bool]:
        return self._moved(ANCHOR, keys, host_indices, self._transport.save).whole

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: object = None
    ) -> dict[str, list[bool]]:
        return self._moved_v2(transfers, self._transport.load)

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: object = None
    ) -> dict[str, list[bool]]:
        return self._moved_v2(transfers, self._transport.save)

    def _moved_v2(self, transfers: Sequence[PoolTransfer], move: _Move) -> dict[str, list[bool]]:
        """Return the verdicts of each pool. No pool is tried after one that got no answer."""
        verdicts: dict[str, list[bool]] = {}
        answered = True
        for transfer in transfers:
            keys = transfer.keys or []
            if answered:
                moved = self._moved(transfer.name, keys, transfer.host_indices, move)
                verdicts[transfer.name], answered = moved
            else:
                verdicts[transfer.name] = [False] * len(keys)
        return verdicts

    def _moved(
        self, name: str, keys: Sequence[str] | None, indices: Indices | None, move: _Move
    ) -> Moved:
        """Return a verdict for each key.

        A whole node's pages go in batches that have a deadline each. The first one that gets no answer
        is the last: a call takes no longer than one deadline beside what the store does in time.
        """
        wanted = keys or []
        whole: list[bool] = []
        answered = True

        def run() -> None:
            nonlocal answered
            pool = self._pools[name]
            places = pool.check(wanted, indices)
            tokens = pool.host.page_size
            for part in _batches(len(wanted), pool.batch_pages):
                batch = places[part.start * tokens : part.stop * tokens]
                moved = move(pool, wanted[part], batch)
                whole.extend(moved.whole)
                answered = moved.answered
                if not answered:
                    return

        if wanted:
            self._answer(run, None)
        return Moved(whole + [False] * (len(wanted) - len(whole)), answered)

    # --- by copy: flat pages -------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: object = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: Sequence[str],
        target_locations: Sequence[Any] | None = None,
        target_sizes: object = None,
    ) -> list[Any]:
        """Each tensor that was filled, or None in its place."""
        found: list[Any] = []

        def run() -> None:
            pool, targets = self._pools[ANCHOR], list(target_locations or ())
            for part in _batches(len(keys), pool.batch_pages):
                filled, answered = self._transport.load_flat(pool, keys[part], targets[part])
                found.extend(filled)
                if not answered:
                    return

        self._answer(run, None)
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
        """Whether all of them were stored."""

        def run() -> bool:
            pool, given = self._pools[ANCHOR], list(values or ())
            saved = (
                self._transport.save_flat(pool, keys[part], given[part]).whole
                for part in _batches(len(keys), pool.batch_pages)
            )
            return all(all(part) for part in saved)  # the first that is not stored ends it

        return self._answer(run, otherwise=False)

    # --- the rest ------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Remove this rank's pages and nothing else. False where the store cannot list its pages."""

        def run() -> bool:
            for pool in self._pools.all():
                for space in pool.spaces:
                    self._storage.clear(replace(space, frame_nbytes=self._store.frame_nbytes))
            return True

        return self._safely(run, otherwise=False)

    def get_stats(self) -> Any:
        """What was moved since the last call, if SGLang collects metrics; else None. Never raises."""
        traffic = self._transport.traffic
        if traffic is None or self._closed:
            return None
        return self._safely(lambda: traffic.take(self.engine.storage_metrics), None)

    def counters(self) -> dict[str, int]:
        """The page store's counters: pages by verdict, bytes, wrong pages deleted."""
        return self._store.stats()

    def close(self) -> None:
        """End the threads and close the storage. Idempotent. In a forked child they are the parent's."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._pools.close()
        self._store.close()
        self._storage.close()

    def _answer(self, act: Callable[[], T], otherwise: T) -> T:
        """Return the result of `act`, or `otherwise` where it raises or the keys name other weights."""
        return otherwise if self._is_outdated() else self._safely(act, otherwise)

    def _is_outdated(self) -> bool:
        """Return True from the moment on when SGLang has loaded other weights, or given them a version.

        The key spaces name the weights of the attach: pages of both would look alike. A forked child has
        none of the threads that a call needs, and is turned away as well.
        """
        if self._outdated or self._pid != os.getpid():
            return True
        later = self.engine.later_arguments()
        # SGLang begins a new list where it publishes its arguments anew.
        for fields in later[self._overridden if len(later) >= self._overridden else 0 :]:
            if changed := WATCHED.intersection(fields):
                self._outdated = True
                logger.error(
                    "SGLang has changed %s, and pages in the storage are of what was before: nothing is"
                    " read or written any more. Detach the storage, and attach it again",
                    ", ".join(sorted(changed)),
                )
        return self._outdated

    def _safely(self, act: Callable[[], T], otherwise: T) -> T:
        """The result of `act`, or `otherwise` where it raises.

        SGLang's threads do not survive every exception, and its scheduler none of them.
        """
        try:
            return act()
        except Exception:
            if not self._closed:
                logger.exception("a call of SGLang's failed, and is answered with a miss")
            return otherwise


def _batches(pages: int, step: int) -> Iterator[slice]:
    return (slice(n, min(n + step, pages)) for n in range(0, pages, step))


def _text(name: str) -> str:
    """The value of a member of one of SGLang's string enums, or a string as it is."""
    return str(getattr(name, "value", name))
