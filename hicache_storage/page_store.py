"""The layer between engines and storages: what every backend needs, written once.

Frames and checksums, hit policies over several pools, splitting and parallelism, one deadline a call, a
circuit breaker, and counters by reason. A failure is a counted miss: no method raises because of what a
store did.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from hicache_storage.breaker import CircuitBreaker
from hicache_storage.counters import Counters
from hicache_storage.errors import (
    CorruptPage,
    HiCacheError,
    StorageClosed,
    StorageTimeout,
    StorageUnavailable,
    UnsupportedOperation,
)
from hicache_storage.frame import Framing, frame_nbytes
from hicache_storage.hit_policy import Pool, longest, usable_too
from hicache_storage.keys import check_page_hashes
from hicache_storage.pace import Pace
from hicache_storage.page import Page
from hicache_storage.questions import Question, asked_together, cuts
from hicache_storage.seconds import check_seconds
from hicache_storage.transfer import Match, Outcome, Verdict
from hicache_storage.workers import Workers, when_all_done

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from concurrent.futures import Future
    from typing import TypeAlias

    from hicache_storage.frame import FramedPage
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import HostBuffer
    from hicache_storage.storage import HiCacheStorage
    from hicache_storage.transfer import Transfer

    Piece: TypeAlias = Callable[[KeySpace, Sequence[str], Sequence[FramedPage]], list[Verdict]]

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Pages go to the storage in pieces, which the threads take one after the other: while one thread hashes
# its pages, another's are on their way. An overdue call ends soon, and bounce buffers stay bounded.
_PIECE_NBYTES = 32 << 20

_STORE_FAILED = frozenset({Verdict.TIMEOUT, Verdict.UNAVAILABLE, Verdict.ERROR})


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStoreSettings:
    """How a page store treats its storage."""

    checksum: Literal["xxh3", "none"] = "xxh3"
    """With "none" the identity and length of a page are still checked."""
    timeout_s: float = 10.0
    """The deadline of a call, everything included."""
    parallelism: int | None = None
    """Concurrent calls to the storage in each direction; None: what the storage declares."""
    breaker_failures: int = 3
    """Failed calls in a row after which the store is left alone."""
    breaker_cooldown_s: float = 5.0

    def __post_init__(self) -> None:
        if self.checksum not in ("xxh3", "none"):
            raise ValueError(f"checksum must be 'xxh3' or 'none', not {self.checksum!r}")
        for name in ("parallelism", "breaker_failures"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be greater than 0, not {value}")
        for name in ("timeout_s", "breaker_cooldown_s"):
            check_seconds(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class _Lane:
    """One direction of traffic: its threads, and how fast they have been."""

    name: str
    workers: Workers
    pace: Pace


class PageStore:
    """Pages of any number of pools in one storage. Thread-safe; does not own the storage.

    Reads and writes have threads of their own, so that a backlog of one never delays the other.
    """

    def __init__(self, storage: HiCacheStorage, settings: PageStoreSettings | None = None) -> None:
        self.storage = storage
        self.settings = settings or PageStoreSettings()
        self.frame_nbytes = frame_nbytes(storage.capabilities.alignment)
        self.breaker = CircuitBreaker(
            failures=self.settings.breaker_failures, cooldown_s=self.settings.breaker_cooldown_s
        )
        self._parallelism = self.settings.parallelism or storage.capabilities.parallelism
        self._loading = _Lane("load", Workers("hicache-read", self._parallelism), Pace())
        self._saving = _Lane("save", Workers("hicache-write", self._parallelism), Pace())
        self._framed: dict[KeySpace, KeySpace] = {}
        self._counters = Counters()
        self._closed = False

    def open_space(self, space: KeySpace) -> None:
        """Make `space` known. Before its first use; idempotent.

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
        future = self._saving.workers.submit(lambda: self.storage.open_space(framed))
        try:
            future.result(self.settings.timeout_s)
        except TimeoutError as error:
            if future.done():  # the storage's own, which says more
                raise
            future.cancel()
            raise StorageTimeout(
                f"the store did not open a key space within {self.settings.timeout_s} s"
            ) from error
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
        timeout_s: float | None = None,
    ) -> Match:
        """The longest prefix of `hashes` that the storage says it has in every pool.

        Pools are asked one after another, each only for the prefix that those before it left; parts of
        one pool, next to each other and of the same name, all at once behind the first of them. `held`
        tells for each pool and page what the caller has: it counts as present, and is not asked for.

        Raises:
            ValueError: No pool, or a malformed hash.
        """
        check_page_hashes(hashes)
        if not pools:
            raise ValueError("a prefix needs at least one pool")
        deadline_s = self._deadline_s(timeout_s)
        usable = [True] * (len(hashes) + 1)
        present: list[list[bool]] = []
        failures: list[Verdict | None] = []
        for together in asked_together(pools):
            questions = [
                Question(
                    self.framed(pools[number].space),
                    hashes,
                    [False] * len(hashes) if held is None else list(held[number]),
                    longest(usable),
                )
                for number in together
            ]
            failures += self._exists(questions, deadline_s, timeout_s)
            for number, question in zip(together, questions, strict=True):
                present.append(question.there)
                usable = usable_too(usable, pools[number], question.there)
        return Match(longest(usable), usable, present, failures)

    def load(self, transfers: Sequence[Transfer], *, timeout_s: float | None = None) -> Outcome:
        """Read pages and prove each of them. Only an OK page holds what was asked for.

        Pages that turn out to be wrong are deleted, so that the next save heals them.

        Raises:
            ValueError: A transfer that does not fit its key space, or a malformed hash.
        """
        return self._run(transfers, self._load_piece, self._loading, timeout_s)

    def save(self, transfers: Sequence[Transfer], *, timeout_s: float | None = None) -> Outcome:
        """Frame and store pages. The payloads must not change until `settled` is done.

        Raises:
            ValueError: A transfer that does not fit its key space, or a malformed hash.
        """
        return self._run(transfers, self._save_piece, self._saving, timeout_s)

    def delete(self, space: KeySpace, hashes: Sequence[str]) -> int:
        """Remove pages; how many of them are gone for certain. Those that never were there count too.

        Raises:
            ValueError: A key space that is not open, or a malformed hash.
        """
        check_page_hashes(hashes)
        framed = self.framed(space)
        if not hashes or not self.breaker.admit():
            return 0
        deadline_s = time.monotonic() + self.settings.timeout_s
        futures = [
            self._saving.workers.submit(partial(self._delete_part, framed, hashes[part]))
            for part in cuts(len(hashes), self.storage.capabilities.max_batch or len(hashes))
        ]
        self._await(futures, deadline_s)
        answers = [_answer(future) for future in futures]
        deleted = [answer for answer in answers if not isinstance(answer, Verdict)]
        self.breaker.record(succeeded=len(deleted) == len(answers))
        gone = sum(answer.count(True) for answer in deleted)
        self._counters.add("deleted_pages", gone)
        return gone

    def register_buffer(self, buffer: HostBuffer) -> None:
        """Announce host memory that pages and headers live in."""
        self.storage.register_buffer(buffer)

    def unregister_buffer(self, buffer: HostBuffer) -> None:
        """The end of `register_buffer`."""
        self.storage.unregister_buffer(buffer)

    def stats(self) -> dict[str, int]:
        """Counters since the start: `{load,save}_{verdict}` pages, bytes, healed pages, trips."""
        return {**self._counters.snapshot(), "breaker_opened": self.breaker.times_opened}

    def close(self, timeout_s: float = 10.0) -> None:
        """End the threads; the storage stays open, and later calls fail at once. Idempotent."""
        if self._closed:
            return
        self._closed = True
        deadline_s = time.monotonic() + timeout_s
        for lane in (self._loading, self._saving):
            if not lane.workers.close(max(0.0, deadline_s - time.monotonic())):
                logger.warning("a storage call still runs after %.0f s: left behind", timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one call: admitted by the breaker, split into blocks, awaited until its deadline ------------

    def _run(
        self,
        transfers: Sequence[Transfer],
        piece: Piece,
        lane: _Lane,
        timeout_s: float | None,
    ) -> Outcome:
        deadline_s = self._deadline_s(timeout_s)
        for transfer in transfers:
            self._check(transfer)
        if not self.breaker.admit():
            return self._turned_away(transfers, lane.name)
        blocks = [self._submit(transfer, piece, lane, deadline_s) for transfer in transfers]
        all_futures = [future for futures in blocks for _, future in futures]
        self._await(all_futures, deadline_s)
        verdicts = [
            [verdict for size, future in futures for verdict in _verdicts(future, size)]
            for futures in blocks
        ]
        tallies = [_tally(per_page) for per_page in verdicts]
        failures = {verdict for tally in tallies for verdict in _STORE_FAILED & tally.keys()}
        self._record(failures, timeout_s)
        self._count(lane.name, transfers, tallies)
        return Outcome(verdicts, when_all_done(all_futures))

    def _await(self, futures: Sequence[Future[T]], deadline_s: float) -> None:
        """Wait for all of them until the deadline; what has not begun by then never does."""
        try:
            wait(futures, max(0.0, deadline_s - time.monotonic()))
        except BaseException:
            self.breaker.dismiss()  # interrupted: a probe tells nothing, and others may follow
            raise
        finally:
            for future in futures:
                future.cancel()

    def _deadline_s(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.settings.timeout_s if timeout_s is None else timeout_s)

    def _record(self, failures: Collection[Verdict], timeout_s: float | None) -> None:
        """Tell the breaker, unless all that was wrong is that the caller did not wait."""
        impatient = timeout_s is not None and timeout_s < self.settings.timeout_s
        if impatient and set(failures) == {Verdict.TIMEOUT}:
            self.breaker.dismiss()
        else:
            self.breaker.record(succeeded=not failures)

    def _submit(
        self, transfer: Transfer, piece: Piece, lane: _Lane, deadline_s: float
    ) -> list[tuple[int, Future[list[Verdict]]]]:
        """Queue the pieces of one transfer: the number of pages of each, and its verdicts to come."""
        framed = self.framed(transfer.space)
        lost: list[Verdict] = []

        def run(part: slice) -> list[Verdict]:
            hashes, pages = transfer.hashes[part], transfer.pages[part]
            if lost:  # the store would not answer this piece either
                return lost[:1] * len(hashes)
            began_s = time.monotonic()
            if began_s > deadline_s:  # nobody waits any more: let the pages go
                return [Verdict.TIMEOUT] * len(hashes)
            try:
                verdicts = piece(framed, hashes, pages)
            except (StorageUnavailable, StorageTimeout) as error:
                lost.append(_blame(error))
                raise
            lane.pace.note(framed, len(hashes), time.monotonic() - began_s)
            return verdicts

        pages = len(transfer.hashes)
        parts = _even_cuts(pages, self._pieces(framed, pages, lane.pace.least_pages(framed)))
        return [(part.stop - part.start, lane.workers.submit(partial(run, part))) for part in parts]

    def _exists(
        self, questions: Sequence[Question], deadline_s: float, timeout_s: float | None
    ) -> list[Verdict | None]:
        """Answer all `questions` at once; for each, why some of it could not be said."""
        parts = [
            (number, part)
            for number, question in enumerate(questions)
            for part in question.parts(self.storage.capabilities.max_batch)
        ]
        failures: list[Verdict | None] = [None] * len(questions)
        if not parts:
            return failures
        if not self.breaker.admit():
            return [Verdict.BREAKER_OPEN if question.asked else None for question in questions]
        futures = [
            self._loading.workers.submit(
                partial(self._exists_part, questions[number].framed, questions[number].of(part))
            )
            for number, part in parts
        ]
        self._await(futures, deadline_s)
        answers = [_answer(future) for future in futures]
        failed = [answer for answer in answers if isinstance(answer, Verdict)]
        self._record(failed, timeout_s)
        self._counters.add("match_failed", len(failed))
        for (number, part), answer in zip(parts, answers, strict=True):
            if isinstance(answer, Verdict):
                failures[number] = failures[number] or answer
            else:
                questions[number].answer(part, answer)
        return failures

    def _exists_part(self, framed: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return _strict(self.storage.batch_exists(framed, hashes), len(hashes))

    def _delete_part(self, framed: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return _strict(self.storage.batch_delete(framed, hashes), len(hashes))

    # --- one piece of a block, on a worker thread ----------------------------------------------------

    def _load_piece(
        self, framed: KeySpace, hashes: Sequence[str], pages: Sequence[FramedPage]
    ) -> list[Verdict]:
        stored = [page.stored for page in pages]
        landing = self._landing(framed, stored)
        found = _strict(self.storage.batch_get(framed, hashes, landing), len(hashes))
        framing = self._framing(framed)
        verdicts: list[Verdict] = []
        for hit, page_hash, page, whole, landed in zip(
            found, hashes, pages, stored, landing, strict=True
        ):
            if hit and landed is not whole:
                whole.copy_from(landed.segments[0])
            verdicts.append(_proved(framing, page_hash, page) if hit else Verdict.MISS)
        self._heal(framed, hashes, verdicts)
        return verdicts

    def _save_piece(
        self, framed: KeySpace, hashes: Sequence[str], pages: Sequence[FramedPage]
    ) -> list[Verdict]:
        framing = self._framing(framed)
        for page_hash, page in zip(hashes, pages, strict=True):
            framing.write(page, page_hash)
        stored = [page.stored for page in pages]
        landing = self._landing(framed, stored)
        for whole, bounced in zip(stored, landing, strict=True):
            if bounced is not whole:
                _gather(whole, bounced.segments[0])
        taken = _strict(self.storage.batch_set(framed, hashes, landing), len(hashes))
        return [Verdict.OK if ok else Verdict.REFUSED for ok in taken]

    def _framing(self, framed: KeySpace) -> Framing:
        return Framing(framed, checksum=self.settings.checksum == "xxh3")

    def _landing(self, framed: KeySpace, stored: list[Page]) -> list[Page]:
        """The pages as the storage wants them: their own segments, or one bounce buffer each."""
        if self.storage.capabilities.scatter_gather:
            return stored
        nbytes = framed.stored_nbytes
        bounce = memoryview(bytearray(nbytes * len(stored)))
        return [Page(bounce[n * nbytes : (n + 1) * nbytes]) for n in range(len(stored))]

    def _heal(self, framed: KeySpace, hashes: Sequence[str], verdicts: list[Verdict]) -> None:
        """Delete what was proved wrong: stores that keep the first bytes would keep it for ever."""
        wrong = [
            page_hash
            for page_hash, verdict in zip(hashes, verdicts, strict=True)
            if verdict not in (Verdict.OK, Verdict.MISS)
        ]
        if not wrong:
            return
        try:
            deleted = _strict(self.storage.batch_delete(framed, wrong), len(wrong))
        except Exception:
            logger.warning("%d wrong pages could not be deleted", len(wrong), exc_info=True)
            return
        self._counters.add("wrong_pages_deleted", sum(deleted))

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

    def _pieces(self, framed: KeySpace, pages: int, least: int) -> int:
        """As many for each thread, and no more threads than have `least` pages to do."""
        threads = min(self._parallelism, max(1, pages // least))
        most = max(1, _PIECE_NBYTES // framed.stored_nbytes)
        most = min(most, self.storage.capabilities.max_batch or most)
        return min(pages, threads * -(-pages // (threads * most)))

    def _turned_away(self, transfers: Sequence[Transfer], counted_as: str) -> Outcome:
        verdicts = [[Verdict.BREAKER_OPEN] * len(transfer.hashes) for transfer in transfers]
        self._count(counted_as, transfers, [_tally(per_page) for per_page in verdicts])
        return Outcome(verdicts, when_all_done([]))

    def _count(
        self, name: str, transfers: Sequence[Transfer], tallies: list[dict[Verdict, int]]
    ) -> None:
        for transfer, tally in zip(transfers, tallies, strict=True):
            for verdict, pages in tally.items():
                self._counters.add(f"{name}_{verdict.value}", pages)
            ok_nbytes = tally.get(Verdict.OK, 0) * transfer.space.page_nbytes
            self._counters.add(f"{name}_nbytes", ok_nbytes)


def _tally(verdicts: list[Verdict]) -> dict[Verdict, int]:
    """How many pages had each verdict. Mostly there is one: counting it is quick, hashing is not."""
    if verdicts.count(Verdict.OK) == len(verdicts):
        return {Verdict.OK: len(verdicts)}
    return Counter(verdicts)


def _proved(framing: Framing, page_hash: str, page: FramedPage) -> Verdict:
    try:
        framing.check(page, page_hash)
    except CorruptPage as error:
        logger.warning("a stored page is wrong and will be deleted: %s", error)
        return Verdict(error.reason)
    return Verdict.OK


def _gather(source: Page, target: memoryview) -> None:
    start = 0
    for segment in source.segments:
        target[start : start + segment.nbytes] = segment
        start += segment.nbytes


def _even_cuts(length: int, pieces: int) -> Iterator[slice]:
    ends = [length * number // pieces for number in range(pieces + 1)] if pieces else []
    return (slice(start, end) for start, end in itertools.pairwise(ends))


def _verdicts(future: Future[list[Verdict]], pages: int) -> list[Verdict]:
    if not future.done() or future.cancelled():
        return [Verdict.TIMEOUT] * pages
    error = future.exception()
    return future.result() if error is None else [_blame(error)] * pages


def _answer(future: Future[list[bool]]) -> list[bool] | Verdict:
    if not future.done() or future.cancelled():
        return Verdict.TIMEOUT
    error = future.exception()
    return future.result() if error is None else _blame(error)


def _blame(error: BaseException) -> Verdict:
    """The verdict for whatever a storage raised."""
    if isinstance(error, StorageTimeout):
        return Verdict.TIMEOUT
    if isinstance(error, StorageUnavailable):
        return Verdict.UNAVAILABLE
    expected = isinstance(error, (StorageClosed, HiCacheError))
    logger.warning("a storage call failed: %s", error, exc_info=None if expected else error)
    return Verdict.ERROR


def _strict(results: Sequence[object], length: int) -> list[bool]:
    """A storage's answers, where only a real True is one.

    Raises:
        ValueError: There are not as many answers as questions: none of them can be trusted.
    """
    if len(results) != length:
        raise ValueError(f"the storage gave {len(results)} answers to {length} questions")
    return [result is True for result in results]
