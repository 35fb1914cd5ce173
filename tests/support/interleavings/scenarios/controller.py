"""Engines and an operator that use one controller at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import ClassVar

from engines import leaked, lost_pages

from hicache_storage.controller import (
    CacheController,
    ControllerSettings,
    DropPolicy,
    PartialHits,
    PrefetchPolicy,
    WritePolicy,
)
from hicache_storage.errors import StorageClosed, StorageTimeout
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings
from interleavings.scenario import Scenario
from interleavings.scenarios.engines import (
    HASHES,
    check_lease,
    check_slots,
    compute,
    make_pools,
    recompute_draft,
)
from interleavings.scenarios.storage import FAILS, REFUSES, SLOW, WORKS, ExploredStorage

_TIMEOUT_S = 5.0


class PairedStorage(ExploredStorage):
    """A storage that loads a page's optional draft only if it has the page's target."""

    draft_is_optional = True

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        if space.pool == "draft" and self.draft_is_optional:
            unpaired = set(hashes).difference(self.stored("kv"))
            self._scenario.require(not unpaired, "a draft is written before its target")
        return super().batch_set(space, hashes, pages)


class ControllerScenario(Scenario):
    """Prefetch, compute, write, evict, clear, attach, detach, cancel and close, all at the same time.

    While a lease is held, its pages have the bytes of their hashes. No two pages share a slot. An
    optional draft is never written before its target. `close` returns False if a page was lost. At
    the end nothing is pinned, no slot and no quota is held, and every request is counted.
    """

    name: ClassVar[str] = "controller"
    slots: ClassVar[int] = 4
    policies: ClassVar[Sequence[WritePolicy]] = tuple(WritePolicy)
    behaviours: ClassVar[Mapping[str, Sequence[str]]] = {
        "get": (*(WORKS,) * 8, SLOW, FAILS),
        "set": (*(WORKS,) * 8, SLOW, FAILS, REFUSES),
        "exists": (*(WORKS,) * 8, FAILS),
    }

    def set_up(self) -> None:
        self.storage = PairedStorage(self, behaviours=self.behaviours)
        self.store = PageStore(
            self.storage,
            PageStoreSettings(timeout_s=_TIMEOUT_S, breaker_failures=1000, parallelism=1),
        )
        self.storage.draft_is_optional = self.pick((True, False))
        pools = make_pools(self.slots, draft_is_required=not self.storage.draft_is_optional)
        settings = ControllerSettings(
            prefetch_policy=self.pick(tuple(PrefetchPolicy)),
            write_policy=self.pick(self.policies),
            partial_hits=self.pick(tuple(PartialHits)),
            prefetch_threshold_tokens=0,
            batch_pages=self.pick((4, 2)),
            write_queue_pages=self.pick((None, 2)),
            drop_policy=self.pick(tuple(DropPolicy)),
            prefetch_threads=self.pick((1, 2)),
            inflight_nbytes=self.pick((None, 1000)),
        )
        self.controller = CacheController(self.store, pools, settings)
        self.controller.start()
        self.requests = 0
        self._uses = (self._compute, self._compute, self._prefetch, self._prefetch, self._cancel)

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {"engine": self._serve, "other": self._serve, "operator": self._operate}

    def check(self) -> None:
        check_slots(self.controller)

    def finish(self) -> None:
        self.scheduler.settle()  # the close causes all losses from here on
        lost = lost_pages(self.controller)
        if self.controller.close(timeout_s=self.pick((60.0, 1.0, 0.0))):
            self.require(lost_pages(self.controller) == lost, "close is True and has lost pages")
        self.scheduler.settle()
        held = leaked(self.controller)
        self.require(not held, f"still held: {', '.join(held)}")
        self.store.close(60)
        counted = self.controller.stats()
        self.require(not counted.get("internal_errors"), "an internal error was counted")
        ended = counted.get("requests", 0) + counted.get("cancelled_requests", 0)
        self.require(ended == self.requests, f"{ended} of {self.requests} requests were counted")

    # --- threads -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        for _ in range(3):
            with suppress(StorageClosed):
                self.pick((*self._uses, self._clear))()

    def _operate(self) -> None:
        for _ in range(2):
            with suppress(StorageClosed):
                self.pick((self._clear, self._swap, self._swap, self._drain, self._close))()

    def _compute(self) -> None:
        start = self.pick((0, 2, 4))
        hashes = HASHES[start : start + self.pick((1, 2))]
        without = self.pick(((), ("draft",))) if self.storage.draft_is_optional else ()
        compute(self.controller, hashes, self.pick((0.0, 1.0)), without=without)

    def _prefetch(self) -> None:
        hashes = HASHES[self.pick((0, 2)) :][: self.pick((2, 4))]
        deadline_s = self.pick((None, None, 1.0))
        prefetch = self.controller.prefetch("request", hashes, deadline_s=deadline_s)
        self.requests += 1
        with prefetch.result() as lease:
            check_lease(self, lease)
            if lease.missing("draft"):
                recompute_draft(lease)
            self.scheduler.point("reads its lease")
            check_lease(self, lease)

    def _cancel(self) -> None:
        prefetch = self.controller.prefetch("cancelled", HASHES[: self.pick((2, 4))])
        self.requests += 1
        self.scheduler.point("cancels")
        prefetch.cancel()

    def _clear(self) -> None:
        self.controller.cache.clear()

    def _drain(self) -> None:
        self.controller.drain(self.pick((0.0, 1.0)))

    def _close(self) -> None:
        self.controller.close(timeout_s=self.pick((30.0, 0.0)))

    def _swap(self) -> None:
        self.controller.detach(drain=self.pick((True, False)), timeout_s=self.pick((30.0, 1.0)))
        self.scheduler.point("attaches")
        with suppress(StorageTimeout):
            self.controller.attach(self.store)


class WriteBackScenario(ControllerScenario):
    """Pages are written when they are evicted, and a store is detached while L2 is cleared."""

    name = "write-back"
    slots = 2
    policies = (WritePolicy.WRITE_BACK,)
    behaviours: ClassVar[Mapping[str, Sequence[str]]] = {"set": (*(WORKS,) * 8, REFUSES)}
    time_passes = False

    def set_up(self) -> None:
        super().set_up()
        compute(self.controller, HASHES[: self.slots], 1.0)

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {"engine": self._serve, "flusher": self._flush, "operator": self._swap}

    def _serve(self) -> None:
        self.pick((self._prefetch, self._compute, self._cancel))()

    def _flush(self) -> None:
        self._clear()
        self._compute()
