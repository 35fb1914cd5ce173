"""The handle that an engine gets for the prefetch of a request."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hicache_storage.controller.consensus import RankPages
from hicache_storage.controller.explain import Explanation
from hicache_storage.controller.lease import Lease
from hicache_storage.controller.ranks import Channel
from hicache_storage.page_store.lookup import longest
from hicache_storage.request_log import Operation, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.controller.consensus import AgreedPages
    from hicache_storage.controller.pools import PoolBits
    from hicache_storage.controller.prefetch_job import PrefetchContext, PrefetchJob
    from hicache_storage.controller.ranks import Topic


class Prefetch:
    """The prefetch of a request. End it with `result`, or with `cancel` if you do not need pages."""

    def __init__(self, context: PrefetchContext, job: PrefetchJob) -> None:
        self.request_id: str = job.request_id
        self.hashes: Sequence[str] = job.hashes
        self._context = context
        self._cache = context.cache
        self._job = job

    @property
    def arrived_pages(self) -> int:
        """The length of the prefix that is usable now, on this rank."""
        return longest(self._cache.pool_set.usable(self._job.filled(), self._context.hit_pools))

    @property
    def complete(self) -> bool:
        """True once no more pages will arrive."""
        return self._job.complete

    def result(self, *, earlier: Sequence[Lease] = ()) -> Lease:
        """Wait as long as the prefetch policy says, end the prefetch, and return a lease of the prefix.

        With several ranks, call it on all ranks, in the same order of requests. All ranks get the same
        number of pages. The lease keeps the pages pinned. Pages that `earlier` leases of this request
        loaded also count as loaded.

        Raises:
            RuntimeError: The prefetch has already ended.
        """
        usable, agreed = self._take(self._context.consensus.agree_pages)
        lease = self._lease(agreed, earlier)
        self._cache.count_use(lease.entries)
        self._context.offer(lease.entries)
        self._count(lease)
        self._count_unused(lease.pages)
        self._explain_result(longest(usable), agreed, lease)
        return lease

    def take_local(self) -> Lease:
        """End the prefetch and return this rank's prefix, before another prefetch of the same request.

        The lease keeps the pages pinned. It does not count as a use or as the end of the request, and no
        other rank is asked.

        Raises:
            RuntimeError: The prefetch has already ended.
        """
        _, agreed = self._take(self._context.consensus.local_pages)
        lease = self._lease(agreed)
        self._job.activity.end({"pages.usable": lease.pages})
        return lease

    def cancel(self) -> None:
        """End the prefetch and unpin its pages. Idempotent. Do nothing after `result`."""
        if not self._job.end():
            return
        self._context.counters.add("cancelled_requests")
        self._job.take_prefix(0)
        self._count_unused(0)
        nothing = self._explanation(0, 0)
        self._record_end(replace(nothing, first_missing=0, reason=Reason.CANCELLED))

    def _take(
        self, agree: Callable[[Topic, RankPages], AgreedPages]
    ) -> tuple[list[bool], AgreedPages]:
        """Wait and end the job. Return the lengths usable on this rank, and the result of `agree`."""
        job, pool_set = self._job, self._cache.pool_set
        job.wait()
        if not job.end():
            raise RuntimeError(f"prefetch of {job.topic.label} has already ended")
        filled = job.filled()
        usable = pool_set.usable(filled, self._context.hit_pools)
        known = pool_set.usable(job.diagnostics.present or filled, pool_set.required)
        try:
            return usable, agree(job.topic, RankPages(usable, filled, longest(known)))
        except BaseException:
            job.take_prefix(0)
            raise

    def _lease(self, agreed: AgreedPages, earlier: Sequence[Lease] = ()) -> Lease:
        pages = agreed.prefix.pages
        loaded = self._job.loaded.union(*(lease.loaded for lease in earlier))
        return Lease(
            self._cache,
            self._job.take_prefix(pages),
            sorted(page for page in loaded if page < pages),
            agreed,
            reduce_min=partial(
                self._context.consensus.minimum_or_zeros, Channel.RESULT, self._job.topic
            ),
            offer=self._context.offer,
        )

    # --- counters and explanation --------------------------------------------------------------------

    def _count(self, lease: Lease) -> None:
        counters = self._context.counters
        counters.add("requests")
        counters.add("l2_hit_pages", lease.l2_pages)
        counters.add("l3_hit_pages", lease.l3_pages)
        counters.add("missed_pages", len(self.hashes) - lease.pages)
        counters.add("target_only_pages", lease.target_only_pages)

    def _count_unused(self, pages: int) -> None:
        """Count the loaded pages that lie beyond a prefix of `pages` pages."""
        unused = sum(page >= pages for page in self._job.loaded)
        self._context.counters.add("loaded_unused_pages", unused)

    def _explain_result(self, usable_pages: int, agreed: AgreedPages, lease: Lease) -> None:
        """Record why the lease is not longer. `usable_pages` is the usable length on this rank."""
        prefix, diagnostics = agreed.prefix, self._job.diagnostics
        gap = self._first_gap(agreed.local, usable_pages)
        result = self._explanation(lease.pages, lease.l3_pages)
        if prefix.lost:
            result = replace(result, first_missing=lease.pages, reason=Reason.RANKS_LOST)
        elif prefix.pages < usable_pages:
            result = replace(
                result, first_missing=lease.pages, reason=Reason.OTHER_RANK, rank=prefix.rank
            )
        elif gap is not None:
            page, number = gap
            reason = diagnostics.reason(page, number, default=self._job.time_up_reason())
            on_other_rank = reason in (Reason.OTHER_RANK, Reason.RANKS_LOST)
            result = replace(
                result,
                first_missing=page,
                pool=None if on_other_rank else self._cache.pools[number].space.pool,
                rank=diagnostics.rank if on_other_rank else None,
                reason=reason,
            )
        self._record_end(result)

    def _record_end(self, result: Explanation) -> None:
        """Keep an explanation, add it to the log, and end the tracing span."""
        self._context.explanations.add(result)
        self._log(result)
        reason = result.reason
        self._job.activity.end(
            {
                "pages.usable": result.usable_pages,
                "pages.l2": result.l2_pages,
                "pages.l3": result.l3_pages,
                **({} if reason is None else {"reason": reason.name.lower()}),
            }
        )

    def _log(self, result: Explanation) -> None:
        log = self._context.explain_log
        if log is None:
            return
        page = result.first_missing
        log.add(
            Operation.PREFETCH,
            request=result.request_id,
            first_hash=self.hashes[0] if self.hashes else None,
            asked_pages=result.asked_pages,
            hit_pages=result.usable_pages,
            l2_pages=result.l2_pages,
            page=page,
            page_hash=self.hashes[page] if page is not None and page < len(self.hashes) else None,
            pool=result.pool,
            other_rank=result.rank,
            reason=result.reason,
            elapsed_s=time.monotonic() - self._job.began_s,
        )

    def _first_gap(self, filled: Sequence[PoolBits], usable_pages: int) -> tuple[int, int] | None:
        """Return the page and the pool at which the prefix ends.

        This is the first page that was found but not loaded, or else the first page that was not found.
        """
        pool_set, hit_pools = self._cache.pool_set, self._context.hit_pools
        present = self._job.diagnostics.present or filled
        known = [own | found for own, found in zip(filled, present, strict=True)]
        planned = longest(pool_set.usable(known, hit_pools))
        return pool_set.first_gap(filled[:planned] if usable_pages < planned else known, hit_pools)

    def _explanation(self, pages: int, l3_pages: int) -> Explanation:
        """Return an explanation of `pages` usable pages, without the reason why the prefix ends."""
        return Explanation(
            request_id=self.request_id,
            asked_pages=len(self.hashes),
            usable_pages=pages,
            l2_pages=pages - l3_pages,
            l3_pages=l3_pages,
        )
