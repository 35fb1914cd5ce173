"""One request's prefetch, as the engine holds it."""

from __future__ import annotations

import threading
import time
from functools import cached_property, partial
from typing import TYPE_CHECKING

from hicache_storage.controller.consensus import Holdings
from hicache_storage.controller.diagnostics import PrefetchDiagnostics
from hicache_storage.controller.explain import Explanation, Reason
from hicache_storage.controller.lease import Lease
from hicache_storage.controller.ranks import Channel
from hicache_storage.controller.topic import Topic
from hicache_storage.durations import MAX_DURATION_S
from hicache_storage.page_store.lookup import longest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.controller.consensus import Taken
    from hicache_storage.controller.context import Context
    from hicache_storage.controller.entry import Entry
    from hicache_storage.controller.pool_set import Bits


# Of a call that is made when the request's deadline has just passed.
_LEAST_TIMEOUT_S = 0.001


class Prefetch:
    """Ended by `result`, or by `cancel` where it is not wanted any more.

    From its start it pins what L2 has of the whole prefix, gaps or not; what arrives is added.
    """

    def __init__(
        self, context: Context, request_id: str, hashes: Sequence[str], deadline_s: float | None
    ) -> None:
        self.request_id = request_id
        self.hashes = hashes
        self.findings = PrefetchDiagnostics()
        self._context = context
        self._cache = context.cache
        self._began_s = time.monotonic()
        self._deadline_s = deadline_s
        page_tokens = self._cache.pools[0].space.page_tokens
        self._patience_s = context.settings.patience_s(len(hashes), page_tokens)
        self._table = self._cache.hold(hashes)
        self._loaded: set[int] = set()
        self._occupied = 0
        self._ended = False
        self._lock = threading.Lock()
        self._complete = threading.Event()

    @cached_property
    def topic(self) -> Topic:
        """What the ranks speak of when they speak of this request."""
        return Topic.of_request(self.request_id, self.hashes)

    @property
    def arrived_pages(self) -> int:
        """The length of the prefix that is usable by now, as far as this rank knows."""
        return longest(self._cache.pool_set.usable(self.filled(), self._context.vital))

    @property
    def complete(self) -> bool:
        """Whether nothing more will arrive."""
        return self._complete.is_set()

    def result(self, *, earlier: Sequence[Lease] = ()) -> Lease:
        """Wait as the policy says, end the prefetch, and take what has arrived, pinned.

        With several ranks all of them take it, in the same order, and get the same number of pages.
        What the leases of `earlier` looks at the same request have loaded counts as loaded for it.

        Raises:
            RuntimeError: It was taken or cancelled before.
        """
        usable, taken = self._take(self._context.agreement.take)
        lease = self._lease(taken, earlier)
        self._cache.use(lease.entries)
        self._context.consider(lease.entries)
        self._count(lease)
        self._count_unused(lease.pages)
        self._explain_result(usable, taken, lease)
        return lease

    def look(self) -> Lease:
        """Take what has arrived on this rank, for a request that is asked for again.

        It is neither the request's use nor its end, and no other rank is asked: it keeps pages pinned.

        Raises:
            RuntimeError: It was taken or cancelled before.
        """
        _, taken = self._take(self._context.agreement.of_this_rank)
        return self._lease(taken)

    def cancel(self) -> None:
        """End the prefetch and let everything go. Idempotent; does nothing after `result`."""
        if not self._end():
            return
        self._context.counters.add("cancelled_requests")
        self._let_go(0)
        self._count_unused(0)
        self._explain(0, 0, first_missing=0, reason=Reason.CANCELLED)

    # --- how it ends ---------------------------------------------------------------------------------

    def _take(self, ask: Callable[[Topic, Holdings], Taken]) -> tuple[list[bool], Taken]:
        """Wait and end; the lengths usable here, and what `ask` makes of what this rank holds."""
        patience_s, left_s = self._patience_s, self.left_s()
        limits_s = [limit_s for limit_s in (patience_s, left_s) if limit_s is not None]
        self._complete.wait(min(*limits_s, MAX_DURATION_S) if limits_s else None)
        if not self._end():
            raise RuntimeError(f"prefetch of {self.topic.told} was ended before")
        filled, pool_set = self.filled(), self._cache.pool_set
        usable = pool_set.usable(filled, self._context.vital)
        known = pool_set.usable(self.findings.present or filled, pool_set.required)
        try:
            return usable, ask(self.topic, Holdings(usable, filled, longest(known)))
        except BaseException:
            self._let_go(0)
            raise

    def _end(self) -> bool:
        """Whether it had not ended before. From here on nothing is added."""
        with self._lock:
            if self._ended:
                return False
            self._ended = True
            occupied, self._occupied = self._occupied, 0
        self._context.occupancy.leave(occupied)
        return True

    def _let_go(self, pages: int) -> None:
        """Unpin what lies behind a prefix of `pages` pages."""
        self._cache.unpin([entry for entry in self._table[pages:] if entry is not None])

    def _lease(self, taken: Taken, earlier: Sequence[Lease] = ()) -> Lease:
        pages = taken.agreed.pages
        self._let_go(pages)
        loaded = self._loaded.union(*(lease.loaded for lease in earlier))
        return Lease(
            self._cache,
            [entry for entry in self._table[:pages] if entry is not None],
            sorted(page for page in loaded if page < pages),
            taken,
            ask=partial(self._context.agreement.answers, Channel.RESULT, self.topic),
            consider=self._context.consider,
        )

    def _count_unused(self, pages: int) -> None:
        """Of what was loaded, what lies behind a prefix of `pages` pages."""
        unused = sum(page >= pages for page in self._loaded)
        self._context.counters.add("loaded_unused_pages", unused)

    def _count(self, lease: Lease) -> None:
        counters = self._context.counters
        counters.add("requests")
        counters.add("l2_hit_pages", lease.l2_pages)
        counters.add("l3_hit_pages", lease.l3_pages)
        counters.add("missed_pages", len(self.hashes) - lease.pages)
        counters.add("target_only_pages", lease.target_only_pages)

    def _explain_result(self, usable: list[bool], taken: Taken, lease: Lease) -> None:
        agreed = taken.agreed
        gap = self._gap(taken.here, longest(usable))
        counts = (lease.pages, lease.l3_pages)
        if agreed.lost:
            self._explain(*counts, first_missing=lease.pages, reason=Reason.RANKS_LOST)
        elif agreed.pages < longest(usable):
            self._explain(
                *counts, first_missing=lease.pages, reason=Reason.OTHER_RANK, rank=agreed.rank
            )
        elif gap is None:
            self._explain(*counts)
        else:
            page, number = gap
            reason = self.findings.why(page, number, overtaken=self._overtaken())
            elsewhere = reason in (Reason.OTHER_RANK, Reason.RANKS_LOST)
            self._explain(
                *counts,
                first_missing=page,
                pool=None if elsewhere else self._cache.pools[number].space.pool,
                rank=self.findings.rank if elsewhere else None,
                reason=reason,
            )

    def _gap(self, filled: Sequence[Bits], usable_pages: int) -> tuple[int, int] | None:
        """For want of what the prefix ends: of what was planned, or of what there was to plan."""
        pool_set, vital = self._cache.pool_set, self._context.vital
        known = [
            had | said for had, said in zip(filled, self.findings.present or filled, strict=True)
        ]
        planned = longest(pool_set.usable(known, vital))
        return pool_set.first_gap(filled[:planned] if usable_pages < planned else known, vital)

    def _explain(
        self,
        pages: int,
        l3_pages: int,
        *,
        first_missing: int | None = None,
        pool: str | None = None,
        rank: int | None = None,
        reason: Reason | None = None,
    ) -> None:
        self._context.explanations.keep(
            Explanation(
                request_id=self.request_id,
                asked_pages=len(self.hashes),
                usable_pages=pages,
                l2_pages=pages - l3_pages,
                l3_pages=l3_pages,
                first_missing=first_missing,
                pool=pool,
                rank=rank,
                reason=reason,
            )
        )

    def _overtaken(self) -> Reason:
        left_s = self.left_s()
        return Reason.DEADLINE if left_s is not None and left_s <= 0 else Reason.PATIENCE

    # --- the prefetching thread's side ---------------------------------------------------------------

    def unwanted(self) -> Reason | None:
        """Why nobody waits for pages any more; None: somebody does."""
        if self._ended:
            return Reason.PATIENCE
        left_s = self.left_s()
        return Reason.DEADLINE if left_s is not None and left_s <= 0 else None

    def left_s(self) -> float | None:
        """Seconds until the request's deadline; None: it has none."""
        if self._deadline_s is None:
            return None
        return self._deadline_s - (time.monotonic() - self._began_s)

    def at_most_s(self, timeout_s: float) -> float:
        """`timeout_s`, or what the request has left where that is less."""
        left_s = self.left_s()
        return timeout_s if left_s is None else min(timeout_s, max(left_s, _LEAST_TIMEOUT_S))

    def entry(self, page: int) -> Entry | None:
        """The page of L2, pinned; None: L2 had none when it was last asked."""
        return self._table[page]

    def filled(self) -> list[Bits]:
        """For each page, the pools that L2 has of it."""
        return [0 if entry is None else entry.filled for entry in self._table]

    def look_again(self) -> list[Bits]:
        """Pin what has come to L2 since, for other requests; the same as `filled`."""
        missing = [page for page, entry in enumerate(self._table) if entry is None]
        found = self._cache.hold(self.hashes[page] for page in missing)
        late = [
            entry
            for page, entry in zip(missing, found, strict=True)
            if entry is not None and not self._put(page, entry)
        ]
        self._cache.unpin(late)
        return self.filled()

    def give_tail(self, pages: int) -> bool:
        """Let go of the last pages that L2 had behind the first gap; False where there are none."""
        given: list[Entry] = []
        with self._lock:
            gap = self._table.index(None) if None in self._table else len(self._table)
            for page in range(len(self._table) - 1, gap, -1):
                entry = self._table[page]
                if entry is None or page in self._loaded or len(given) == pages or self._ended:
                    continue
                self._table[page] = None
                given.insert(0, entry)
        self._cache.unpin(given)
        return bool(given)

    def occupy(self, pages: int) -> bool:
        """Whether there is room for `pages` pages among those of other prefetches."""
        occupancy = self._context.occupancy
        if not occupancy.enter(pages):
            return False
        with self._lock:
            ended = self._ended
            if not ended:
                self._occupied += pages
        if ended:
            occupancy.leave(pages)
        return True

    def add(self, page: int, entry: Entry) -> bool:
        """A pinned page that was loaded; False, and it is not added, where the prefetch has ended."""
        with self._lock:
            if not self._ended:
                self._table[page] = entry
                self._loaded.add(page)
            return not self._ended

    def note_loaded(self, page: int) -> bool:
        """More of a page was loaded; False where that came too late."""
        with self._lock:
            if not self._ended:
                self._loaded.add(page)
            return not self._ended

    def finish(self) -> None:
        """Nothing more will arrive."""
        self._complete.set()

    def _put(self, page: int, entry: Entry) -> bool:
        with self._lock:
            if self._ended:
                return False
            self._table[page] = entry
            return True
