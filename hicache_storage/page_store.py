"""The layer between engines and storages: what every backend needs, written once.

Frames and checksums, hit policies over several pools, splitting and parallelism, one deadline a call,
circuit breakers for reads and writes, and counters by reason. A failure is a counted miss: no method
raises because of what a store did.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

from hicache_storage.breaker import Breakers, CircuitBreaker
from hicache_storage.counters import Counters
from hicache_storage.deadline import Deadline
from hicache_storage.errors import StorageTimeout, StorageUnavailable, UnsupportedOperation
from hicache_storage.frame import frame_nbytes
from hicache_storage.framed_io import FramedIO
from hicache_storage.hit_policy import HitPolicy, Pool, longest, usable_too
from hicache_storage.keys import check_page_hashes
from hicache_storage.lane import Lane, answer_of, blame
from hicache_storage.per_process import PerProcess
from hicache_storage.questions import Inquiry, Question, asked_together, even_cuts, piece_count
from hicache_storage.seconds import check_seconds
from hicache_storage.store_state import StoreState
from hicache_storage.transfer import Match, Outcome, Verdict
from hicache_storage.whole_numbers import check_whole
from hicache_storage.workers import when_all_done

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from typing import TypeAlias

    from hicache_storage.breaker import Admission
    from hicache_storage.frame import FramedPage
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import HostBuffer
    from hicache_storage.storage import HiCacheStorage
    from hicache_storage.transfer import Transfer

    Piece: TypeAlias = Callable[[KeySpace, Sequence[str], Sequence[FramedPage]], list[Verdict]]

logger = logging.getLogger(__name__)

# Pages go to the storage in pieces, which the threads take one after the other: while one thread hashes
# its pages, another's are on their way. An overdue call ends soon, and bounce buffers stay bounded.
_PIECE_NBYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStoreSettings:
    """How a page store treats its storage."""

    checksum: Literal["xxh3", "none"] = "xxh3"
    """With "none" the identity and length of a page are still checked."""
    timeout_s: float = 10.0
    """The deadline of a call, everything included. A storage call that takes longer has failed, also
    where its caller had less patience."""
    parallelism: int | None = None
    """Concurrent calls to the storage in each direction; None: what the storage declares."""
    breaker_failures: int = 3
    """Failed calls in a row, of one direction, after which the store is left alone in that direction."""
    breaker_cooldown_s: float = 5.0

    def __post_init__(self) -> None:
        if self.checksum not in ("xxh3", "none"):
            raise ValueError(f"checksum must be 'xxh3' or 'none', not {self.checksum!r}")
        for name in ("parallelism", "breaker_failures"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least=1)
        for name in ("timeout_s", "breaker_cooldown_s"):
            check_seconds(name, getattr(self, name))


class _Running:
    """What only the process that made it may use: threads, locks, and what they count."""

    def __init__(
        self, storage: HiCacheStorage, settings: PageStoreSettings, *, closed: bool
    ) -> None:
        self.counters = Counters()
        breakers = [
            CircuitBreaker(
                failures=settings.breaker_failures, cooldown_s=settings.breaker_cooldown_s
            )
            for _ in range(2)
        ]
        self.breakers = Breakers(*breakers)
        store = type(storage).__name__
        self.reads, self.writes = (
            Lane(
                name,
                threads=settings.parallelism or storage.capabilities.parallelism,
                timeout_s=settings.timeout_s,
                breaker=breaker,
                state=StoreState(traffic, logger),
            )
            for name, traffic, breaker in zip(
                ("read", "write"),
                (f"reads from {store}", f"writes to {store}"),
                breakers,
                strict=True,
            )
        )
        if closed:  # before the fork
            self.reads.close(0)
            self.writes.close(0)


class PageStore:
    """Pages of any number of pools in one storage. Thread-safe; does not own the storage.

    Reads and writes have threads and breakers of their own, so that trouble of one is none of the other.
    Deleting and opening a key space change the store: they go with the writes. A forked child gets
    threads, breakers and counters of its own with its first call; what its parent had begun is not its.
    """

    def __init__(self, storage: HiCacheStorage, settings: PageStoreSettings | None = None) -> None:
        self.storage = storage
        self.settings = settings or PageStoreSettings()
        self.frame_nbytes = frame_nbytes(storage.capabilities.alignment)
        self._io = FramedIO(storage, checksum=self.settings.checksum == "xxh3")
        self._framed: dict[KeySpace, KeySpace] = {}
        self._closed = False
        self._close_timeout_s = 0.0
        self._running = PerProcess(
            lambda: _Running(self.storage, self.settings, closed=self._closed),
            close=self._end_threads,
        )

    @property
    def breaker(self) -> Breakers:
        """The breakers of `reads` and `writes`, and the worse `state` of both."""
        return self._running.get().breakers

    def open_space(self, space: KeySpace) -> None:
        """Make `space` known. Before its first use; idempotent.

        The breaker is not asked and learns nothing: whoever opens wants the store's own answer.

        Raises:
            ValueError: The space has a frame already.
            UnsupportedOperation: Its pages are larger than the storage takes.
            StorageUnavailable, StorageTimeout: The store does not answer.
            StorageClosed: This page store was closed, or its storage was.
        """
        Pool(space=space)
        framed = replace(space, frame_nbytes=self.frame_nbytes)
        limit = self.storage.capabilities.max_page_nbytes
        if limit is not None and framed.stored_nbytes > limit:
            raise UnsupportedOperation(
                f"the storage takes pages of up to {limit} bytes; pool {space.pool!r} stores"
                f" {framed.stored_nbytes}: use a smaller page size"
            )
        lane = self._running.get().writes
        future = lane.submit(lambda: self.storage.open_space(framed))
        lane.wait([future], Deadline(self.settings.timeout_s))
        if future.cancelled() or not future.done():
            raise StorageTimeout(
                f"the store did not open a key space within {self.settings.timeout_s} s"
            )
        future.result()
        self._framed[space] = framed

    def framed(self, space: KeySpace) -> KeySpace:
        """`space` as the storage knows it: for calls that the page store does not wrap.

        Raises:
            ValueError: It is not open.
        """
        try:
            return self._framed[space]
        except KeyError:
            raise ValueError(
                f"key space of pool {space.pool!r} is not open: call open_space first"
            ) from None

    def match(
        self,
        hashes: Sequence[str],
        pools: Sequence[Pool],
        *,
        held: Sequence[Sequence[bool]] | None = None,
        past_gaps: bool = False,
        timeout_s: float | None = None,
    ) -> Match:
        """The longest prefix of `hashes` that the storage says it has in every pool.

        Pools are asked one after another, each only for the prefix that those before it left; parts of
        one pool, next to each other and of the same name, all at once behind the first of them. `held`
        tells for each pool and page what the caller has: it counts as present, and is not asked for.

        A pool that needs all pages is asked in growing blocks, up to its first gap; a trailing pool, and
        with `past_gaps` every pool, for all pages at once. What was answered before the deadline counts.

        Raises:
            ValueError: No pool, or a malformed hash.
        """
        check_page_hashes(hashes)
        if not pools:
            raise ValueError("a prefix needs at least one pool")
        framed = [self.framed(pool.space) for pool in pools]
        usable = [True] * (len(hashes) + 1)
        present: list[list[bool]] = []
        failures: list[Verdict | None] = []
        with self._inquiry(timeout_s) as inquiry:
            for together in asked_together(pools):
                questions = [
                    Question(
                        framed[number],
                        hashes,
                        held=None if held is None else held[number],
                        pages=longest(usable),
                        past_gaps=past_gaps or pools[number].hit_policy is not HitPolicy.ALL_PAGES,
                    )
                    for number in together
                ]
                inquiry.ask(questions)
                for number, question in zip(together, questions, strict=True):
                    present.append(question.there)
                    failures.append(question.failure)
                    usable = usable_too(usable, pools[number], question.there)
        return Match(longest(usable), usable, present, failures)

    def present(
        self, space: KeySpace, hashes: Sequence[str], *, timeout_s: float | None = None
    ) -> list[bool | None]:
        """For each of any hashes, in any order: is its page there? None: the store could not say.

        Raises:
            ValueError: A key space that is not open, or a malformed hash.
        """
        check_page_hashes(hashes)
        question = Question(self.framed(space), hashes, pages=len(hashes), past_gaps=True)
        with self._inquiry(timeout_s) as inquiry:
            inquiry.ask([question])
        return question.answers

    def load(self, transfers: Sequence[Transfer], *, timeout_s: float | None = None) -> Outcome:
        """Read pages and prove each of them. Only an OK page holds what was asked for.

        Pages that turn out to be wrong are deleted, within the same deadline, so that the next save
        heals them.

        Raises:
            ValueError: A transfer that does not fit its key space, or a malformed hash.
        """
        deadline = self._deadline(timeout_s)
        lane = self._running.get().reads
        outcome = self._run(transfers, self._io.load, lane, "load", deadline)
        self._heal(transfers, outcome, deadline)
        return outcome

    def save(self, transfers: Sequence[Transfer], *, timeout_s: float | None = None) -> Outcome:
        """Frame and store pages. The payloads must not change until `settled` is done.

        Raises:
            ValueError: A transfer that does not fit its key space, or a malformed hash.
        """
        lane = self._running.get().writes
        return self._run(transfers, self._io.save, lane, "save", self._deadline(timeout_s))

    def delete(self, space: KeySpace, hashes: Sequence[str]) -> int:
        """Remove pages; how many of them are gone for certain. Those that never were there count too.

        Raises:
            ValueError: A key space that is not open, or a malformed hash.
        """
        check_page_hashes(hashes)
        gone = self._delete({self.framed(space): hashes}, self._deadline(None))
        self._running.get().counters.add("deleted_pages", gone)
        return gone

    def register_buffer(self, buffer: HostBuffer) -> None:
        """Announce host memory that pages and headers live in."""
        self.storage.register_buffer(buffer)

    def unregister_buffer(self, buffer: HostBuffer) -> None:
        """The end of `register_buffer`."""
        self.storage.unregister_buffer(buffer)

    def stats(self) -> dict[str, int]:
        """Counters since the start: `{load,save}_{verdict}` pages, bytes, healed pages, trips.

        `breaker_opened` is the sum of `read_breaker_opened` and `write_breaker_opened`.
        """
        running = self._running.get()
        return {
            **running.counters.snapshot(),
            "breaker_opened": running.breakers.times_opened,
            "read_breaker_opened": running.breakers.reads.times_opened,
            "write_breaker_opened": running.breakers.writes.times_opened,
        }

    def close(self, timeout_s: float = 10.0) -> None:
        """End the threads; the storage stays open, and later calls fail at once. Idempotent."""
        if not self._closed:
            self._closed = True
            self._close_timeout_s = timeout_s
            self._running.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_threads(self, running: _Running) -> None:
        deadline = Deadline(self._close_timeout_s)
        for lane in (running.reads, running.writes):
            if not lane.close(deadline.remaining_s()):
                logger.warning(
                    "a storage call still runs after %.0f s: left behind", deadline.timeout_s
                )

    # --- one call: admitted by the breaker, split into pieces, awaited until its deadline ------------

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self.settings.timeout_s if timeout_s is None else timeout_s)

    @contextmanager
    def _inquiry(self, timeout_s: float | None) -> Generator[Inquiry, None, None]:
        running = self._running.get()
        inquiry = Inquiry(self.storage, running.reads, self._deadline(timeout_s))
        with inquiry:
            yield inquiry
        running.counters.add("match_failed", inquiry.failed_calls)

    def _run(
        self,
        transfers: Sequence[Transfer],
        piece: Piece,
        lane: Lane,
        counted_as: str,
        deadline: Deadline,
    ) -> Outcome:
        began_s = time.monotonic()
        for transfer in transfers:
            self._check(transfer)
        if not any(len(transfer.hashes) for transfer in transfers):
            return Outcome([[] for _ in transfers], when_all_done([]))
        admission = lane.admit()
        if admission is None:
            verdicts = [[Verdict.BREAKER_OPEN] * len(transfer.hashes) for transfer in transfers]
            self._count(counted_as, transfers, verdicts, lane, began_s)
            return Outcome(verdicts, when_all_done([]))
        with admission:
            blocks = [self._submit(one, piece, lane, admission, deadline) for one in transfers]
            futures = [future for block in blocks for _, future in block]
            lane.wait(futures, deadline)
        verdicts = [
            [verdict for pages, future in block for verdict in _verdicts(future, pages)]
            for block in blocks
        ]
        lane.conclude(admission, futures, deadline)
        self._count(counted_as, transfers, verdicts, lane, began_s)
        return Outcome(verdicts, when_all_done(futures))

    def _submit(
        self,
        transfer: Transfer,
        piece: Piece,
        lane: Lane,
        admission: Admission,
        deadline: Deadline,
    ) -> list[tuple[int, Future[list[Verdict]]]]:
        """Queue the pieces of one transfer: the number of pages of each, and its verdicts to come."""
        framed = self.framed(transfer.space)
        lost: list[Verdict] = []

        def run(part: slice) -> list[Verdict]:
            hashes, pages = transfer.hashes[part], transfer.pages[part]
            if lost:  # the store would not answer this piece either
                return lost[:1] * len(hashes)
            if deadline.passed():  # nobody waits any more: let the pages go
                return [Verdict.TIMEOUT] * len(hashes)
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

    def _pieces(self, framed: KeySpace, pages: int, lane: Lane) -> int:
        most = max(1, _PIECE_NBYTES // framed.stored_nbytes)
        most = min(most, self.storage.capabilities.max_batch or most)
        least = lane.pace.least_pages(framed)
        return piece_count(pages, threads=lane.threads, least=least, most=most)

    def _delete(self, wanted: Mapping[KeySpace, Sequence[str]], deadline: Deadline) -> int:
        """Remove pages of framed key spaces; how many of them are gone for certain."""
        lane = self._running.get().writes
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

    def _batches(self, pages: int) -> Iterator[slice]:
        step = self.storage.capabilities.max_batch or max(1, pages)
        return (slice(start, min(start + step, pages)) for start in range(0, pages, step))

    def _heal(self, transfers: Sequence[Transfer], outcome: Outcome, deadline: Deadline) -> None:
        """Delete what was proved wrong: stores that keep the first bytes would keep it for ever."""
        wrong: dict[KeySpace, list[str]] = {}
        for transfer, verdicts in zip(transfers, outcome.verdicts, strict=True):
            found = [
                page_hash
                for page_hash, verdict in zip(transfer.hashes, verdicts, strict=True)
                if verdict in _PROVED_WRONG
            ]
            if found:
                wrong.setdefault(self.framed(transfer.space), []).extend(found)
        if not wrong:
            return
        deleted = self._delete(wrong, deadline)
        self._running.get().counters.add("wrong_pages_deleted", deleted)
        left = sum(map(len, wrong.values())) - deleted
        if left:
            logger.warning("%d wrong pages could not be deleted", left)

    # --- small parts ---------------------------------------------------------------------------------

    def _check(self, transfer: Transfer) -> None:
        self.framed(transfer.space)
        check_page_hashes(transfer.hashes)
        if len(transfer.pages) != len(transfer.hashes):
            raise ValueError(f"{len(transfer.hashes)} hashes but {len(transfer.pages)} pages")
        wanted = (self.frame_nbytes, transfer.space.page_nbytes)
        for page in transfer.pages:
            if (len(page.header), page.payload.nbytes) != wanted:
                raise ValueError(
                    f"pool {transfer.space.pool!r} needs a header of {wanted[0]} bytes and a payload of"
                    f" {wanted[1]}, not {len(page.header)} and {page.payload.nbytes}"
                )

    def _count(
        self,
        name: str,
        transfers: Sequence[Transfer],
        verdicts: list[list[Verdict]],
        lane: Lane,
        began_s: float,
    ) -> None:
        counters = self._running.get().counters
        total: Counter[Verdict] = Counter()
        for transfer, per_page in zip(transfers, verdicts, strict=True):
            tally = _tally(per_page)
            for verdict, pages in tally.items():
                counters.add(f"{name}_{verdict.value}", pages)
                total[verdict] += pages
            ok_nbytes = tally.get(Verdict.OK, 0) * transfer.space.page_nbytes
            counters.add(f"{name}_nbytes", ok_nbytes)
        lane.state.note(total, began_s)


_PROVED_WRONG = frozenset({Verdict.CORRUPT, Verdict.WRONG_KEY, Verdict.WRONG_SIZE})


def _tally(verdicts: list[Verdict]) -> dict[Verdict, int]:
    """How many pages had each verdict. Mostly there is one: counting it is quick, hashing is not."""
    if verdicts.count(Verdict.OK) == len(verdicts):
        return {Verdict.OK: len(verdicts)}
    return Counter(verdicts)


def _verdicts(future: Future[list[Verdict]], pages: int) -> list[Verdict]:
    answer = answer_of(future)
    return [answer] * pages if isinstance(answer, Verdict) else answer
