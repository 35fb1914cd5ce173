"""Storage calls of a page store in one process: split, permitted, awaited until a deadline, counted."""

from __future__ import annotations

import logging
import time
from collections import Counter
from functools import partial
from itertools import compress, pairwise
from typing import TYPE_CHECKING, NamedTuple

from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.executor import when_all_done
from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.page_store.breaker import Breakers, CircuitBreaker
from hicache_storage.page_store.call_durations import CallDurations
from hicache_storage.page_store.call_executor import (
    CallExecutor,
    NotTriedError,
    result_of,
    verdict_for,
)
from hicache_storage.page_store.counters import nbytes_counter, pages_counter
from hicache_storage.page_store.framed_io import FramedIO
from hicache_storage.page_store.results import Outcome, Verdict
from hicache_storage.page_store.state_log import StateLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from typing import TypeAlias

    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store.breaker import Permit
    from hicache_storage.page_store.counters import Direction
    from hicache_storage.page_store.frame import FramedPage
    from hicache_storage.page_store.results import Transfer
    from hicache_storage.page_store.settings import PageStoreSettings
    from hicache_storage.storage import HiCacheStorage

    MovePages: TypeAlias = Callable[[KeySpace, Sequence[str], Sequence[FramedPage]], list[Verdict]]
    FramedTransfer: TypeAlias = tuple[KeySpace, Transfer]
    """A transfer behind its framed key space, which the storage knows."""

logger: logging.Logger = logging.getLogger("hicache_storage.page_store")

# A transfer is split into storage calls, which the threads take one after the other: while one
# thread hashes its pages, another's are under way. A small call ends soon after its deadline, and
# bounds the bounce buffers.
_MAX_CALL_NBYTES = 32 << 20
# A call of a slow store is shorter, so that the calls of others soon have their turn.
_MAX_CALL_S = 0.25
# Threads without work need a moment to end, also where the other direction used up the time.
_MIN_CLOSE_S = 0.1

# Threads wake each other, wait for the interpreter's lock, and meet again in the store's own locks:
# a second thread pays where its pages keep the store busy for longer than this. Measured with
# benchmarks/file.py: two threads are slower than one for pages of 64 KiB, and faster from 1 MiB on.
_MIN_THREAD_S = 0.006
# A thread moves and hashes this many bytes outside of the interpreter's lock, however fast the
# store is.
_MIN_THREAD_NBYTES = 8 << 20
# Behind other calls, a transfer that takes no longer is one call: several would only wait in turn, and
# each of them for the interpreter's lock.
_LONG_CALL_S = 0.05
# The first estimate of a transfer: a plain copy at 1 GB/s.
_FIRST_ESTIMATE_S_PER_BYTE = 1e-9
# The first estimate of an exists query: a look into a table, or the status of a file.
_FIRST_EXISTS_S = 2e-6
_WEIGHT = 0.2
# Clients choose the number of key spaces by their salts. The estimates are soon learned again.
_MOST_ESTIMATES = 4096


class LatencyEstimator:
    """The seconds that one kind of call takes for a page of each key space: a moving average.

    Threads may call `note` at the same time. A lost sample does no harm.
    """

    def __init__(self, *, first_estimate_s: float | None = None) -> None:
        """Start with `first_estimate_s` for any page. None: with the time of its copy."""
        self._first_estimate_s = first_estimate_s
        self._s_per_page: dict[KeySpace, float] = {}

    def note(self, space: KeySpace, pages: int, elapsed_s: float) -> None:
        """Add the sample of one storage call that took `elapsed_s` for `pages` pages."""
        sample = elapsed_s / pages
        self._s_per_page[space] = sample * _WEIGHT + self.s_per_page(space) * (1 - _WEIGHT)
        if len(self._s_per_page) > _MOST_ESTIMATES:
            self._s_per_page.clear()

    def s_per_page(self, space: KeySpace) -> float:
        """Return the estimate for one page."""
        estimate = self._s_per_page.get(space, self._first_estimate_s)
        return space.stored_nbytes * _FIRST_ESTIMATE_S_PER_BYTE if estimate is None else estimate

    def min_transfer_pages(self, space: KeySpace) -> int:
        """Return the smallest number of pages that justify a thread of their own in a transfer."""
        by_nbytes = -(-_MIN_THREAD_NBYTES // space.stored_nbytes)
        return min(self.min_exists_pages(space), by_nbytes)

    def min_exists_pages(self, space: KeySpace) -> int:
        """Return the smallest number of pages that justify a thread of their own in an exists query."""
        return max(1, round(_MIN_THREAD_S / max(self.s_per_page(space), 1e-9)))


def piece_count(pages: int, *, threads: int, least: int, most: int) -> int:
    """Return the number of pieces of at most `most` pages: a multiple of the threads that are used.

    Each used thread gets `least` pages or more.
    """
    threads = min(threads, max(1, pages // least))
    return min(pages, threads * -(-pages // (threads * most)))


def even_cuts(length: int, pieces: int) -> Iterator[slice]:
    """Yield `pieces` slices that make up `length`, as even as possible."""
    ends = [length * number // pieces for number in range(pieces + 1)] if pieces else []
    return (slice(start, end) for start, end in pairwise(ends))


class _Operation(NamedTuple):
    """One of the two kinds of transfer."""

    direction: Direction
    executor: CallExecutor
    latency: LatencyEstimator
    move: MovePages


class CallScheduler:
    """The threads, breakers and counters of a page store in one process. Thread-safe."""

    def __init__(self, storage: HiCacheStorage, settings: PageStoreSettings) -> None:
        self.counters: Counters = Counters()
        self.durations: CallDurations = CallDurations()
        reads, writes = (
            CircuitBreaker(
                failures=settings.breaker_failures, cooldown_s=settings.breaker_cooldown_s
            )
            for _ in range(2)
        )
        self.breakers: Breakers = Breakers(reads, writes)
        self._storage = storage
        self._io = FramedIO(storage, checksum=settings.checksum == "xxh3")

        def executor(
            name: str, timeout_s: float, breaker: CircuitBreaker, label: str
        ) -> CallExecutor:
            return CallExecutor(
                name,
                threads=settings.parallelism or storage.capabilities.parallelism,
                timeout_s=timeout_s,
                breaker=breaker,
                state=StateLog(f"{label} {type(storage).__name__}", logger),
            )

        self.reads: CallExecutor = executor("read", settings.timeout_s, reads, "reads from")
        self.writes: CallExecutor = executor("write", settings.writes_s, writes, "writes to")
        self.exists_latency: LatencyEstimator = LatencyEstimator(first_estimate_s=_FIRST_EXISTS_S)
        self._load = _Operation("load", self.reads, LatencyEstimator(), self._io.load)
        self._save = _Operation("save", self.writes, LatencyEstimator(), self._io.save)

    def close(self, timeout_s: float) -> None:
        """End the threads. Leave a storage call behind that still runs after `timeout_s`."""
        deadline = Deadline(timeout_s)
        for executor in (self.reads, self.writes):
            if not executor.close(max(_MIN_CLOSE_S, deadline.remaining_s())):
                logger.warning("a storage call still runs after %.0f s: left behind", timeout_s)

    def load(self, transfers: Sequence[FramedTransfer], deadline: Deadline) -> Outcome:
        """Read pages and check their frames."""
        return self._run(self._load, transfers, deadline)

    def save(self, transfers: Sequence[FramedTransfer], deadline: Deadline) -> Outcome:
        """Frame and store pages."""
        return self._run(self._save, transfers, deadline)

    def delete(self, wanted: Mapping[KeySpace, Sequence[str]], deadline: Deadline) -> list[str]:
        """Remove pages of framed key spaces. Return the pages that are certainly gone."""
        executor = self.writes
        began_s = time.monotonic()
        parts = [
            (framed, hashes[part])
            for framed, hashes in wanted.items()
            for part in self._delete_batches(len(hashes))
        ]
        if not parts:
            return []
        permit = executor.admit()
        if permit is None:
            pages = sum(len(hashes) for _, hashes in parts)
            executor.state.note({Verdict.BREAKER_OPEN: pages}, began_s)
            return []
        with permit:
            futures: list[Future[list[bool] | Verdict]] = [
                executor.submit(partial(self._io.delete, framed, hashes), permit)
                for framed, hashes in parts
            ]
            executor.wait(futures, deadline)
        results = [result_of(future) for future in futures]
        executor.conclude(permit, futures, deadline)
        tally: Counter[Verdict] = Counter()
        for (_, hashes), result in zip(parts, results, strict=True):
            tally[result if isinstance(result, Verdict) else Verdict.OK] += len(hashes)
        executor.state.note(tally, began_s)
        return [
            page_hash
            for (_, hashes), result in zip(parts, results, strict=True)
            if not isinstance(result, Verdict)
            for page_hash in compress(hashes, result)
        ]

    def max_pages(self, most: int) -> int:
        """Return the most pages of one storage call: `most`, or fewer where the storage needs that."""
        return min(max(1, most), self._storage.capabilities.max_batch or max(1, most))

    def _run(
        self, operation: _Operation, transfers: Sequence[FramedTransfer], deadline: Deadline
    ) -> Outcome:
        began_s = time.monotonic()
        if not any(len(transfer.hashes) for _, transfer in transfers):
            return Outcome([[] for _ in transfers], when_all_done([]))
        executor = operation.executor
        permit = executor.admit()
        if permit is None:
            verdicts = [[Verdict.BREAKER_OPEN] * len(transfer.hashes) for _, transfer in transfers]
            self._count(operation, transfers, verdicts, began_s)
            return Outcome(verdicts, when_all_done([]))
        with permit:
            calls = [
                self._submit(operation, framed, transfer, permit, deadline)
                for framed, transfer in transfers
            ]
            futures = [future for calls_of_one in calls for _, future in calls_of_one]
            executor.wait(futures, deadline)
        verdicts = [
            [verdict for pages, future in calls_of_one for verdict in _verdicts(future, pages)]
            for calls_of_one in calls
        ]
        executor.conclude(permit, futures, deadline)
        self._count(operation, transfers, verdicts, began_s)
        return Outcome(verdicts, when_all_done(futures))

    def _submit(
        self,
        operation: _Operation,
        framed: KeySpace,
        transfer: Transfer,
        permit: Permit,
        deadline: Deadline,
    ) -> list[tuple[int, Future[list[Verdict]]]]:
        """Submit the storage calls of one transfer. Return the pages and the verdicts of each."""
        failure: list[Verdict] = []

        def call(part: slice) -> list[Verdict]:
            hashes, pages = transfer.hashes[part], transfer.pages[part]
            if failure:  # the store would not answer this call either
                return failure[:1] * len(hashes)
            if deadline.passed():  # no caller waits any more, and the pages become free
                raise NotTriedError
            began_s = time.monotonic()
            try:
                verdicts = operation.move(framed, hashes, pages)
            except (StorageUnavailable, StorageTimeout) as error:
                failure.append(verdict_for(error))
                raise
            operation.latency.note(framed, len(hashes), time.monotonic() - began_s)
            return verdicts

        pieces = piece_count(
            len(transfer.hashes),
            threads=self._useful_threads(operation, framed, len(transfer.hashes)),
            least=operation.latency.min_transfer_pages(framed),
            most=self.max_pages(
                min(
                    _MAX_CALL_NBYTES // framed.stored_nbytes,
                    int(_MAX_CALL_S / max(operation.latency.s_per_page(framed), 1e-9)),
                )
            ),
        )
        return [
            (part.stop - part.start, operation.executor.submit(partial(call, part), permit))
            for part in even_cuts(len(transfer.hashes), pieces)
        ]

    def _useful_threads(self, operation: _Operation, framed: KeySpace, pages: int) -> int:
        """Return over how many threads to split a transfer: the idle ones, or more of a slow store."""
        executor = operation.executor
        expected_s = operation.latency.s_per_page(framed) * pages
        return min(executor.threads, max(executor.idle_threads, round(expected_s / _LONG_CALL_S)))

    def _delete_batches(self, pages: int) -> Iterator[slice]:
        step = self.max_pages(pages)
        return (slice(start, min(start + step, pages)) for start in range(0, pages, step))

    def _count(
        self,
        operation: _Operation,
        transfers: Sequence[FramedTransfer],
        verdicts: list[list[Verdict]],
        began_s: float,
    ) -> None:
        direction = operation.direction
        total: Counter[Verdict] = Counter()
        for (_, transfer), per_page in zip(transfers, verdicts, strict=True):
            tally = _tally(per_page)
            for verdict, pages in tally.items():
                self.counters.add(pages_counter(direction, verdict), pages)
                total[verdict] += pages
            ok_nbytes = tally.get(Verdict.OK, 0) * transfer.space.page_nbytes
            self.counters.add(nbytes_counter(direction), ok_nbytes)
        operation.executor.state.note(total, began_s)
        self.durations.note(direction, total, time.monotonic() - began_s)


def _tally(verdicts: list[Verdict]) -> dict[Verdict, int]:
    """Count the pages of each verdict. Mostly all are OK, and `list.count` needs no hashing for that."""
    if verdicts.count(Verdict.OK) == len(verdicts):
        return {Verdict.OK: len(verdicts)}
    return Counter(verdicts)


def _verdicts(future: Future[list[Verdict]], pages: int) -> list[Verdict]:
    result = result_of(future)
    return [result] * pages if isinstance(result, Verdict) else result
