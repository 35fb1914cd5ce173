"""The storage calls of a page store in one process: admitted, split, awaited for so long, counted."""

from __future__ import annotations

import logging
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.executor import when_all_done
from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.page_store.breaker import Breakers, CircuitBreaker
from hicache_storage.page_store.call_executor import CallExecutor, NotTriedError, answer_of, blame
from hicache_storage.page_store.framed_io import FramedIO
from hicache_storage.page_store.lookup import PrefixLookup, even_cuts, piece_count
from hicache_storage.page_store.results import Outcome, Verdict
from hicache_storage.page_store.state_log import StateLog

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from typing import TypeAlias

    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store import PageStoreSettings
    from hicache_storage.page_store.breaker import Admission
    from hicache_storage.page_store.frame import FramedPage
    from hicache_storage.page_store.results import Transfer
    from hicache_storage.storage import HiCacheStorage

    Piece: TypeAlias = Callable[[KeySpace, Sequence[str], Sequence[FramedPage]], list[Verdict]]
    Move: TypeAlias = tuple[KeySpace, Transfer]
    """A transfer, behind its key space as the storage knows it."""

logger = logging.getLogger("hicache_storage.page_store")

# Pages go to the storage in pieces, which the threads take one after the other: while one thread hashes
# its pages, another's are on their way. An overdue call ends soon, and bounce buffers stay bounded.
_PIECE_NBYTES = 32 << 20
# Threads that have nothing to do need a moment, also where the other direction took all the time.
_TO_END_S = 0.1


class CallScheduler:
    """Threads, breakers and counters: what only the process that made it may use. Thread-safe."""

    def __init__(self, storage: HiCacheStorage, settings: PageStoreSettings) -> None:
        self.counters = Counters()
        reads, writes = (
            CircuitBreaker(
                failures=settings.breaker_failures, cooldown_s=settings.breaker_cooldown_s
            )
            for _ in range(2)
        )
        self.breakers = Breakers(reads, writes)
        self._storage = storage
        self._io = FramedIO(storage, checksum=settings.checksum == "xxh3")

        def lane(name: str, breaker: CircuitBreaker, traffic: str) -> CallExecutor:
            return CallExecutor(
                name,
                threads=settings.parallelism or storage.capabilities.parallelism,
                timeout_s=settings.timeout_s,
                breaker=breaker,
                state=StateLog(f"{traffic} {type(storage).__name__}", logger),
            )

        self.reads = lane("read", reads, "reads from")
        self.writes = lane("write", writes, "writes to")

    def close(self, timeout_s: float) -> None:
        """End the threads; calls that still run after `timeout_s` are left behind."""
        deadline = Deadline(timeout_s)
        for lane in (self.reads, self.writes):
            if not lane.close(max(_TO_END_S, deadline.remaining_s())):
                logger.warning("a storage call still runs after %.0f s: left behind", timeout_s)

    def load(self, moves: Sequence[Move], deadline: Deadline) -> Outcome:
        """Read and prove pages."""
        return self._run(moves, self._io.load, self.reads, "load", deadline)

    def save(self, moves: Sequence[Move], deadline: Deadline) -> Outcome:
        """Frame and store pages."""
        return self._run(moves, self._io.save, self.writes, "save", deadline)

    def delete(self, wanted: Mapping[KeySpace, Sequence[str]], deadline: Deadline) -> int:
        """Remove pages of framed key spaces; how many of them are gone for certain."""
        lane = self.writes
        began_s = time.monotonic()
        parts = [
            (framed, hashes[part])
            for framed, hashes in wanted.items()
            for part in self._batches(len(hashes))
        ]
        if not parts:
            return 0
        asked = sum(len(hashes) for _, hashes in parts)
        admission = lane.admit()
        if admission is None:
            lane.state.note({Verdict.BREAKER_OPEN: asked}, began_s)
            return 0
        with admission:
            futures: list[Future[list[bool] | Verdict]] = [
                lane.submit(partial(self._io.delete, framed, hashes), admission)
                for framed, hashes in parts
            ]
            lane.wait(futures, deadline)
        answers = [answer_of(future) for future in futures]
        lane.conclude(admission, futures, deadline)
        tally: Counter[Verdict] = Counter()
        for (_, hashes), answer in zip(parts, answers, strict=True):
            tally[answer if isinstance(answer, Verdict) else Verdict.OK] += len(hashes)
        lane.state.note(tally, began_s)
        return sum(answer.count(True) for answer in answers if not isinstance(answer, Verdict))

    @contextmanager
    def inquiry(self, deadline: Deadline) -> Generator[PrefixLookup, None, None]:
        """Ask what the storage has, within the block."""
        inquiry = PrefixLookup(self._storage, self.reads, deadline)
        with inquiry:
            yield inquiry
        self.counters.add("match_failed", inquiry.failed_calls)

    def _run(
        self,
        moves: Sequence[Move],
        piece: Piece,
        lane: CallExecutor,
        counted_as: str,
        deadline: Deadline,
    ) -> Outcome:
        began_s = time.monotonic()
        if not any(len(transfer.hashes) for _, transfer in moves):
            return Outcome([[] for _ in moves], when_all_done([]))
        admission = lane.admit()
        if admission is None:
            verdicts = [[Verdict.BREAKER_OPEN] * len(transfer.hashes) for _, transfer in moves]
            self._count(counted_as, moves, verdicts, lane, began_s)
            return Outcome(verdicts, when_all_done([]))
        with admission:
            blocks = [self._submit(one, piece, lane, admission, deadline) for one in moves]
            futures = [future for block in blocks for _, future in block]
            lane.wait(futures, deadline)
        verdicts = [
            [verdict for pages, future in block for verdict in _verdicts(future, pages)]
            for block in blocks
        ]
        lane.conclude(admission, futures, deadline)
        self._count(counted_as, moves, verdicts, lane, began_s)
        return Outcome(verdicts, when_all_done(futures))

    def _submit(
        self,
        move: Move,
        piece: Piece,
        lane: CallExecutor,
        admission: Admission,
        deadline: Deadline,
    ) -> list[tuple[int, Future[list[Verdict]]]]:
        """Queue the pieces of one transfer: the number of pages of each, and its verdicts to come."""
        framed, transfer = move
        lost: list[Verdict] = []

        def run(part: slice) -> list[Verdict]:
            hashes, pages = transfer.hashes[part], transfer.pages[part]
            if lost:  # the store would not answer this piece either
                return lost[:1] * len(hashes)
            if deadline.passed():  # nobody waits any more: let the pages go
                raise NotTriedError
            began_s = time.monotonic()
            try:
                verdicts = piece(framed, hashes, pages)
            except (StorageUnavailable, StorageTimeout) as error:
                lost.append(blame(error))
                raise
            lane.pace.note(framed, len(hashes), time.monotonic() - began_s)
            return verdicts

        pages = len(transfer.hashes)
        return [
            (part.stop - part.start, lane.submit(partial(run, part), admission))
            for part in even_cuts(pages, self._pieces(framed, pages, lane))
        ]

    def _pieces(self, framed: KeySpace, pages: int, lane: CallExecutor) -> int:
        most = max(1, _PIECE_NBYTES // framed.stored_nbytes)
        most = min(most, self._storage.capabilities.max_batch or most)
        least = lane.pace.least_pages(framed)
        return piece_count(pages, threads=lane.threads, least=least, most=most)

    def _batches(self, pages: int) -> Iterator[slice]:
        step = self._storage.capabilities.max_batch or max(1, pages)
        return (slice(start, min(start + step, pages)) for start in range(0, pages, step))

    def _count(
        self,
        name: str,
        moves: Sequence[Move],
        verdicts: list[list[Verdict]],
        lane: CallExecutor,
        began_s: float,
    ) -> None:
        total: Counter[Verdict] = Counter()
        for (_, transfer), per_page in zip(moves, verdicts, strict=True):
            tally = _tally(per_page)
            for verdict, pages in tally.items():
                self.counters.add(f"{name}_{verdict.value}", pages)
                total[verdict] += pages
            ok_nbytes = tally.get(Verdict.OK, 0) * transfer.space.page_nbytes
            self.counters.add(f"{name}_nbytes", ok_nbytes)
        lane.state.note(total, began_s)


def _tally(verdicts: list[Verdict]) -> dict[Verdict, int]:
    """How many pages had each verdict. Mostly there is one: counting it is quick, hashing is not."""
    if verdicts.count(Verdict.OK) == len(verdicts):
        return {Verdict.OK: len(verdicts)}
    return Counter(verdicts)


def _verdicts(future: Future[list[Verdict]], pages: int) -> list[Verdict]:
    answer = answer_of(future)
    return [answer] * pages if isinstance(answer, Verdict) else answer
