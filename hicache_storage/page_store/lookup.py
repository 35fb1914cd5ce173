"""Ask a storage which pages each pool has, and find the longest usable prefix.

Source of the hit policies: sglang/srt/mem_cache/hicache_storage.py, `PoolHitPolicy`.
"""

from __future__ import annotations

import enum
import time
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Protocol, Self

from hicache_storage.backend_support.answers import unanswered_in
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.page_store.begun import Waiting
from hicache_storage.page_store.counters import MATCH_FAILED, answers_counter
from hicache_storage.page_store.results import Verdict
from hicache_storage.page_store.splitting import even_cuts, piece_count
from hicache_storage.page_store.storage_calls import checked_answers, result_of, verdict_for
from hicache_storage.scalars import check_integer

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from concurrent.futures import Future

    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store.breaker import Permit
    from hicache_storage.page_store.storage_calls import Lanes
    from hicache_storage.storage import HiCacheStorage

# A cold prompt takes one call of 64 pages. A warm prompt of 4,000 pages takes 4 rounds of up to
# 2,656 pages.
_FIRST_BLOCK = 64
_GROWTH = 4
# How long one call of a slow store may take. Only calls that end before the deadline count.
_MAX_CALL_S = 0.5
# How long a lookup waits for a store that hung. A later answer still reaches the breaker.
_PROBE_S = 0.25


# --- hit policies ---------------------------------------------------------------------------------


class HitPolicy(enum.Enum):
    """The rule that says which pages of a pool a prefix needs."""

    ALL_PAGES = "all_pages"
    """Every page, as for attention KV, draft KV and indexers."""
    TRAILING_PAGES = "trailing_pages"
    """Only the last `window_pages`, as for sliding windows and Mamba states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """One pool of a request: the target's, a draft model's, or a side pool."""

    space: KeySpace
    """The engine's key space, without a frame."""
    hit_policy: HitPolicy = HitPolicy.ALL_PAGES
    window_pages: int = 1
    """For TRAILING_PAGES: how many pages before the end of the prefix are needed."""

    def __post_init__(self) -> None:
        if self.space.frame_nbytes:
            raise ValueError(
                "a pool's key space must have no frame, because the page store adds it"
            )
        check_integer("window_pages", self.window_pages, least=1)


class HasHitPolicy(Protocol):
    @property
    def hit_policy(self) -> HitPolicy: ...

    @property
    def window_pages(self) -> int: ...


def narrow_usable(
    usable: Sequence[bool], pool: HasHitPolicy, present: Sequence[bool]
) -> list[bool]:
    """Return, for each prefix length from 0 to n, whether it was `usable` and is usable in `pool`.

    `present` has n items: True if the pool has the page. Length 0 is always usable. The result is a
    list and not a number, because with a trailing pool 5 pages can be usable although 4 are not.
    """
    pages = len(present)
    if pool.hit_policy is HitPolicy.ALL_PAGES:
        first_missing = present.index(False) if False in present else pages
        return [*usable[: first_missing + 1], *[False] * (pages - first_missing)]
    missing_before = list(accumulate((not page for page in present), initial=0))
    return [
        before and missing_before[end] == missing_before[max(0, end - pool.window_pages)]
        for end, before in enumerate(usable)
    ]


def longest(usable: Sequence[bool]) -> int:
    """Return the length of the longest usable prefix, in pages."""
    return len(usable) - 1 - usable[::-1].index(True)


def usable_lengths(pools: Sequence[HasHitPolicy], present: Sequence[Sequence[bool]]) -> list[bool]:
    """Return, for each prefix length from 0 to n, whether it is usable in every pool.

    `present[p]` has n items: True if pool p has the page.
    """
    usable = [True] * (len(present[0]) + 1)
    for pool, row in zip(pools, present, strict=True):
        usable = narrow_usable(usable, pool, row)
    return usable


def usable_prefix(pools: Sequence[HasHitPolicy], present: Sequence[Sequence[bool]]) -> int:
    """Return the length of the longest prefix that is usable in every pool, in pages."""
    return longest(usable_lengths(pools, present))


# --- exists queries -------------------------------------------------------------------------------


class ExistsQuery:
    """A query for the pages of a prefix that a storage has in one pool.

    It skips pages that are `held`.
    """

    def __init__(
        self,
        framed: KeySpace,
        hashes: Sequence[str],
        *,
        held: Sequence[bool] | None = None,
        pages: int,
        past_gaps: bool,
    ) -> None:
        """Query the first `pages` pages: all with `past_gaps`, else up to the first gap."""
        self.framed = framed
        self.failure: Verdict | None = None
        """The verdict of the first call that failed."""
        self.is_partial: bool = False
        """True if a part of the storage did not answer about some pages."""
        self.answers: list[bool | None] = [None] * len(hashes)
        """For each page: True, False, or None if it was not queried or the storage did not answer."""
        if held is not None:
            self.answers = [own or None for own in held]
        self._hashes = hashes
        self._past_gaps = past_gaps
        self._pages = [page for page in range(pages) if self.answers[page] is None]
        self._queried = 0
        self._block = len(self._pages) if past_gaps else _FIRST_BLOCK

    @property
    def present(self) -> list[bool]:
        """For each page, True if the storage or the caller has it."""
        return [answer is True for answer in self.answers]

    @property
    def verdicts(self) -> list[Verdict]:
        """For each page: OK, MISS, or the reason why there is no answer."""
        failure = self.failure or (Verdict.PART_UNAVAILABLE if self.is_partial else Verdict.TIMEOUT)
        return [
            failure if answer is None else Verdict.OK if answer else Verdict.MISS
            for answer in self.answers
        ]

    @property
    def end(self) -> int:
        """The first missing page, if later pages are useless without it; else the number of pages."""
        if not self._past_gaps:
            for page in self._pages[: self._queried]:
                if not self.answers[page]:
                    return page
        return len(self.answers)

    def next_block(self) -> list[int]:
        """Return the pages to query in the next call."""
        block = self._pages[self._queried : self._queried + self._block]
        self._queried += len(block)
        self._block *= _GROWTH
        return block

    def stop_at(self, end: int) -> None:
        """Do not query `end` or any later page."""
        del self._pages[bisect_left(self._pages, end) :]

    def hashes_of(self, pages: Sequence[int]) -> list[str]:
        return [self._hashes[page] for page in pages]

    def record(self, pages: Sequence[int], result: list[bool] | Verdict) -> None:
        """Record the answers of one storage call for `pages`, or why it failed."""
        if isinstance(result, Verdict):
            self.failure = self.failure or result
        else:
            for page, answer in zip(pages, result, strict=True):
                self.answers[page] = answer
            for position in unanswered_in(result):
                self.answers[pages[position]] = None
                self.is_partial = True


class PrefixLookup:
    """All exists queries of one page store call, under one permit and one deadline. Not thread-safe."""

    def __init__(
        self,
        storage: HiCacheStorage,
        lanes: Lanes,
        deadline: Deadline,
        hang_s: float | None = None,
    ) -> None:
        self._storage = storage
        self._lanes = lanes
        self._reads = lanes.reads
        self._latency = lanes.exists_latency
        self._deadline = deadline
        self._hang_s = hang_s
        self._began_s = time.monotonic()
        self._permit: Permit | None = None
        self._failure: Verdict | None = None
        self._failed_calls = 0
        self._futures: list[Future[list[bool] | Verdict]] = []
        self._pages: dict[Verdict, int] = {}
        self._present_pages = 0

    def query(self, queries: Sequence[ExistsQuery]) -> Generator[Waiting]:
        """Answer `queries` together, in growing blocks from the first page on."""
        while blocks := [(query, block) for query in queries if (block := query.next_block())]:
            calls = [(query, part) for query, block in blocks for part in self._split(query, block)]
            results = yield from self._results(calls)
            for (query, part), result in zip(calls, results, strict=True):
                query.record(part, result)
                verdict = result if isinstance(result, Verdict) else Verdict.OK
                self._failed_calls += verdict not in (Verdict.OK, Verdict.BREAKER_OPEN)
                self._pages[verdict] = self._pages.get(verdict, 0) + len(part)
                if not isinstance(result, Verdict):
                    self._present_pages += result.count(True)
                    if unanswered := len(unanswered_in(result)):
                        partial = self._pages.get(Verdict.PART_UNAVAILABLE, 0)
                        self._pages[Verdict.PART_UNAVAILABLE] = partial + unanswered
                        self._pages[Verdict.OK] -= unanswered
            end = min(query.end for query in queries)
            for query in queries:
                query.stop_at(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, interrupted: type[BaseException] | None, *_: object) -> None:
        """Report the result to the breaker, the log and the counters, if there was a query."""
        if self._permit is not None:
            if interrupted is None:
                self._reads.conclude(self._permit, self._futures, self._hang_s)
            else:
                self._permit.dismiss()
        self._reads.state.note(self._pages, self._began_s)
        if interrupted is None:
            self._count()

    def _count(self) -> None:
        answered = self._pages.get(Verdict.OK, 0)
        add = self._lanes.counters.add
        add(MATCH_FAILED, self._failed_calls)
        add(answers_counter("present"), self._present_pages)
        add(answers_counter("absent"), answered - self._present_pages)
        add(answers_counter("unanswered"), sum(self._pages.values()) - answered)
        elapsed_s = time.monotonic() - self._began_s
        self._lanes.durations.note("match", self._pages, elapsed_s)

    def _results(
        self, calls: Sequence[tuple[ExistsQuery, Sequence[int]]]
    ) -> Generator[Waiting, None, Sequence[list[bool] | Verdict]]:
        if self._failure is None and self._deadline.passed():
            self._failure = Verdict.TIMEOUT
        elif self._failure is None and self._permit is None:
            self._permit = self._reads.guard.admit()
            if self._permit is None:
                self._failure = Verdict.BREAKER_OPEN
            elif self._permit.is_probe and self._hang_s is not None:
                # The store may still hang. If it answers later, the breaker closes as well.
                self._deadline = Deadline(min(_PROBE_S, self._deadline.remaining_s()))
        if self._permit is None or self._failure is not None:
            return [self._failure or Verdict.BREAKER_OPEN] * len(calls)
        futures = [
            self._reads.submit(
                partial(self._call, query.framed, query.hashes_of(part)),
                self._permit,
                self._deadline,
            )
            for query, part in calls
        ]
        self._futures += futures
        yield Waiting(futures, self._deadline)
        return [result_of(future) for future in futures]

    def _call(self, framed: KeySpace, hashes: Sequence[str]) -> list[bool] | Verdict:
        if self._failure is not None:  # the store would not answer this call either
            return self._failure
        began_s = time.monotonic()
        try:
            answers = self._storage.batch_exists(framed, hashes)
        except (StorageUnavailable, StorageTimeout) as error:
            self._failure = verdict_for(error)
            raise
        if len(hashes) >= _FIRST_BLOCK:  # most of a smaller call is the round trip
            self._latency.note(framed, len(hashes), time.monotonic() - began_s)
        return checked_answers(answers, len(hashes))

    def _split(self, query: ExistsQuery, block: Sequence[int]) -> list[Sequence[int]]:
        s_per_page = max(self._latency.s_per_page(query.framed), 1e-9)
        pieces = piece_count(
            len(block),
            threads=self._reads.threads,
            least=self._latency.min_exists_pages(query.framed),
            most=self._reads.max_pages(round(_MAX_CALL_S / s_per_page)),
        )
        return [block[part] for part in even_cuts(len(block), pieces)]


def query_groups(pools: Sequence[PoolSpec]) -> list[list[int]]:
    """Return the numbers of the pools that are queried together, group by group.

    Adjacent pools of one name are parts of one pool. The first part is a group, and the others are the
    next group.
    """
    groups: list[list[int]] = []
    for _, parts in groupby(range(len(pools)), key=lambda number: pools[number].space.pool):
        first, *others = parts
        groups += [[first], others] if others else [[first]]
    return groups
