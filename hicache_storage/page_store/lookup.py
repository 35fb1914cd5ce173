"""What a storage is asked about a prefix, in which order, and how much of it at a time."""

from __future__ import annotations

import time
from bisect import bisect_left
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Self

from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.page_store.call_executor import answer_of, blame, strict
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store.breaker import Admission
    from hicache_storage.page_store.call_executor import CallExecutor
    from hicache_storage.page_store.hit_policy import PoolSpec
    from hicache_storage.storage import HiCacheStorage

# A cold prompt costs one call of 64 pages; a warm one of 4,000 costs 4 rounds, of up to 2,656 pages.
_FIRST_BLOCK = 64
_GROWTH = 4
# What one call of a slow store may take: what was answered before the deadline is kept, call by call.
_CALL_S = 0.5


class ExistsQuery:
    """Which of a prefix's pages one pool has, of those that the caller has not."""

    def __init__(
        self,
        framed: KeySpace,
        hashes: Sequence[str],
        *,
        held: Sequence[bool] | None = None,
        pages: int,
        past_gaps: bool,
    ) -> None:
        """Ask about the first `pages` pages, up to the first that is missing or, `past_gaps`, all."""
        self.framed = framed
        self.failure: Verdict | None = None
        """Why some of it could not be said."""
        self.answers: list[bool | None] = [None] * len(hashes)
        """None: it was not asked for, or the storage could not say."""
        if held is not None:
            self.answers = [mine or None for mine in held]
        self._hashes = hashes
        self._past_gaps = past_gaps
        self._wanted = [page for page in range(pages) if self.answers[page] is None]
        self._asked = 0
        self._block = len(self._wanted) if past_gaps else _FIRST_BLOCK

    @property
    def there(self) -> list[bool]:
        """For each page: is it there, as far as anybody has said?"""
        return [answer is True for answer in self.answers]

    @property
    def end(self) -> int:
        """The page for want of which nothing behind it is asked for; no page: all are."""
        if not self._past_gaps:
            for page in self._wanted[: self._asked]:
                if not self.answers[page]:
                    return page
        return len(self.answers)

    def next_block(self) -> list[int]:
        """The pages that are asked for next."""
        block = self._wanted[self._asked : self._asked + self._block]
        self._asked += len(block)
        self._block *= _GROWTH
        return block

    def stop_at(self, end: int) -> None:
        """Ask for nothing from page `end` on."""
        del self._wanted[bisect_left(self._wanted, end) :]

    def of(self, pages: Sequence[int]) -> list[str]:
        """Their hashes."""
        return [self._hashes[page] for page in pages]

    def answer(self, pages: Sequence[int], answers: list[bool] | Verdict) -> None:
        """Take what the storage said to one call, or why it said nothing."""
        if isinstance(answers, Verdict):
            self.failure = self.failure or answers
        else:
            for page, answer in zip(pages, answers, strict=True):
                self.answers[page] = answer


class PrefixLookup:
    """All questions of one call of the page store: one admission, one deadline. Not thread-safe."""

    def __init__(self, storage: HiCacheStorage, lane: CallExecutor, deadline: Deadline) -> None:
        self.failed_calls = 0
        self._storage = storage
        self._lane = lane
        self._deadline = deadline
        self._began_s = time.monotonic()
        self._admission: Admission | None = None
        self._given_up: Verdict | None = None
        self._futures: list[Future[list[bool] | Verdict]] = []
        self._pages: dict[Verdict, int] = {}

    def ask(self, questions: Sequence[ExistsQuery]) -> None:
        """Answer all of `questions` together, in growing blocks from the front."""
        while blocks := [(one, block) for one in questions if (block := one.next_block())]:
            calls = [(one, part) for one, block in blocks for part in self._parts(one, block)]
            for (one, part), answer in zip(calls, self._answers(calls), strict=True):
                one.answer(part, answer)
                verdict = answer if isinstance(answer, Verdict) else Verdict.OK
                self.failed_calls += verdict not in (Verdict.OK, Verdict.BREAKER_OPEN)
                self._pages[verdict] = self._pages.get(verdict, 0) + len(part)
            end = min(one.end for one in questions)
            for one in questions:
                one.stop_at(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, interrupted: type[BaseException] | None, *_: object) -> None:
        """Tell the breaker and the log how it went; nothing where nothing was asked."""
        if self._admission is not None:
            if interrupted is None:
                self._lane.conclude(self._admission, self._futures, self._deadline)
            else:
                self._admission.dismiss()
        self._lane.state.note(self._pages, self._began_s)

    def _answers(
        self, calls: Sequence[tuple[ExistsQuery, Sequence[int]]]
    ) -> Sequence[list[bool] | Verdict]:
        if self._given_up is None and self._admission is None:
            self._admission = self._lane.admit()
            if self._admission is None:
                self._given_up = Verdict.BREAKER_OPEN
        elif self._given_up is None and self._deadline.passed():
            self._given_up = Verdict.TIMEOUT
        if self._admission is None or self._given_up is not None:
            return [self._given_up or Verdict.BREAKER_OPEN] * len(calls)
        futures = [
            self._lane.submit(partial(self._exists, one.framed, one.of(part)), self._admission)
            for one, part in calls
        ]
        self._futures += futures
        self._lane.wait(futures, self._deadline)
        return [answer_of(future) for future in futures]

    def _exists(self, framed: KeySpace, hashes: Sequence[str]) -> list[bool] | Verdict:
        if self._given_up is not None:  # the store would not answer this call either
            return self._given_up
        began_s = time.monotonic()
        try:
            found = self._storage.batch_exists(framed, hashes)
        except (StorageUnavailable, StorageTimeout) as error:
            self._given_up = blame(error)
            raise
        if len(hashes) >= _FIRST_BLOCK:  # fewer tell of the round trip, not of the page
            pace = self._lane.pace_of_questions
            pace.note(framed, len(hashes), time.monotonic() - began_s)
        return strict(found, len(hashes))

    def _parts(self, one: ExistsQuery, block: Sequence[int]) -> list[Sequence[int]]:
        pace = self._lane.pace_of_questions
        most = max(1, round(_CALL_S / max(pace.s_per_page(one.framed), 1e-9)))
        most = min(most, self._storage.capabilities.max_batch or most)
        least = pace.least_questions(one.framed)
        pieces = piece_count(len(block), threads=self._lane.threads, least=least, most=most)
        return [block[part] for part in even_cuts(len(block), pieces)]


def asked_together(pools: Sequence[PoolSpec]) -> list[list[int]]:
    """The pools in their order; of the parts of one, first the first and then all the others."""
    groups: list[list[int]] = []
    for _, parts in groupby(range(len(pools)), key=lambda number: pools[number].space.pool):
        first, *others = parts
        groups += [[first], others] if others else [[first]]
    return groups


def piece_count(pages: int, *, threads: int, least: int, most: int) -> int:
    """Pieces of at most `most` pages: as many for each thread, and no thread with less than `least`."""
    threads = min(threads, max(1, pages // least))
    return min(pages, threads * -(-pages // (threads * most)))


def even_cuts(length: int, pieces: int) -> Iterator[slice]:
    """`pieces` slices that make up `length`, as even as can be."""
    ends = [length * number // pieces for number in range(pieces + 1)] if pieces else []
    return (slice(start, end) for start, end in pairwise(ends))
