"""Call the storage: ask the breaker, split, frame, wait until the deadline, count the verdicts.

Open this module to see what happens to a call that is late or fails.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from hicache_storage.backend_support.answers import PartialAnswers, unanswered_in
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.executor import DaemonExecutor, call_when_done
from hicache_storage.backend_support.revocable import AtomicRevocable, RevokedError
from hicache_storage.errors import HiCacheError, StorageTimeout, StorageUnavailable
from hicache_storage.page_store.begun import Calls, Waiting
from hicache_storage.page_store.breaker import Breakers
from hicache_storage.page_store.call_durations import CallDurations
from hicache_storage.page_store.call_guard import CallGuard
from hicache_storage.page_store.counters import nbytes_counter, pages_counter
from hicache_storage.page_store.frame import Framing, completed_checksums
from hicache_storage.page_store.loans import Loan, Loans, NoMemoryError
from hicache_storage.page_store.results import Outcome, Verdict
from hicache_storage.page_store.splitting import LatencyEstimator, even_cuts, piece_count
from hicache_storage.page_store.state_log import StateLog

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from typing import Any, TypeAlias

    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store.breaker import Permit
    from hicache_storage.page_store.counters import Direction
    from hicache_storage.page_store.results import Transfer
    from hicache_storage.page_store.settings import PageStoreSettings
    from hicache_storage.page_store.spaces import OpenSpaces

    FramedTransfer: TypeAlias = tuple[KeySpace, Transfer]
    """The framed key space under which the storage has the pages, and their transfer."""

logger: logging.Logger = logging.getLogger("hicache_storage.page_store")

T = TypeVar("T")

# A transfer is split into storage calls, which the threads take one after the other: while one
# thread hashes or copies its pages, the store moves those of another thread.
# Calls of a slow store have fewer pages, so that other calls soon get their turn.
_MAX_CALL_S = 0.25
# While other calls are running, a transfer that takes no longer than this is one call: several calls
# would only wait in turn, and each of them for the interpreter's lock.
_LONG_CALL_S = 0.05
# The first estimate of an exists query: a look into a table, or the status of a file.
_FIRST_EXISTS_S = 2e-6
# Threads without work need a moment to end, even if the other direction used up the time.
_MIN_CLOSE_S = 0.1
# A call counts as hung after this part of the limit, because it begins a little after its caller.
_MOST = 0.9


class NotTriedError(Exception):
    """A storage call did not begin. The error says nothing about the store."""

    def __init__(self, verdict: Verdict = Verdict.TIMEOUT) -> None:
        super().__init__(verdict)
        self.verdict = verdict


class _Part(NamedTuple):
    """One storage call of a transfer."""

    framed: KeySpace
    hashes: Sequence[str]
    loan: Loan
    """The pages of the hashes."""
    permit: Permit
    deadline: Deadline
    failure: list[Verdict]
    """The verdict of the first part without an answer. All parts of a transfer share this list."""


class Lane:
    """The storage calls of one direction, and the threads that make them. Thread-safe.

    A storage call that runs longer than `timeout_s` counts as a failure, even if its caller stopped
    waiting earlier. The breaker records the failure when the storage call ends, or when the next call
    asks for a permit.
    """

    def __init__(
        self,
        direction: Direction,
        spaces: OpenSpaces,
        settings: PageStoreSettings,
        counters: Counters,
        durations: CallDurations,
    ) -> None:
        loads, storage = direction == "load", spaces.storage
        self.threads: int = settings.parallelism or storage.capabilities.parallelism
        self._timeout_s = settings.timeout_s if loads else settings.writes_s
        self.guard: CallGuard = CallGuard(
            timeout_s=self._timeout_s,
            failures=settings.breaker_failures,
            cooldown_s=settings.breaker_cooldown_s,
        )
        label = "reads from" if loads else "writes to"
        self.state: StateLog = StateLog(f"{label} {type(storage).__name__}", logger)
        self._direction: Direction = direction
        self._storage = storage
        self._spaces = spaces
        self._checksum = settings.checksum == "xxh3"
        self._counters = counters
        self._durations = durations
        self.loans: Loans = Loans(storage, settings)
        self._latency = LatencyEstimator()
        self._executor = DaemonExecutor(f"hicache-{'read' if loads else 'write'}", self.threads)

    @property
    def idle_threads(self) -> int:
        """The number of threads that are idle, or 1 if none is."""
        return max(1, self.threads - self.guard.running_count - self._executor.waiting_count)

    def max_pages(self, most: int) -> int:
        """Return the most hashes of one storage call: `most`, or fewer if the storage needs that."""
        return min(max(1, most), self._storage.capabilities.max_batch or max(1, most))

    def close(self, timeout_s: float) -> bool:
        """End the threads. Return False if a storage call still runs after `timeout_s`."""
        try:
            return self._executor.close(timeout_s)
        finally:
            self.loans.memory.close()

    # --- pages ---------------------------------------------------------------------------------------

    def move(
        self, transfers: Sequence[FramedTransfer], deadline: Deadline
    ) -> Generator[Waiting, None, Outcome]:
        """Read pages and check their frames, or frame pages and store them.

        The pages are on loan until the call ends.
        """
        began_s = time.monotonic()
        if not any(len(transfer.hashes) for _, transfer in transfers):
            return Outcome([[] for _ in transfers])
        permit = None if deadline.passed() else self.guard.admit()
        if permit is None:
            verdict = Verdict.TIMEOUT if deadline.passed() else Verdict.BREAKER_OPEN
            verdicts = [[verdict] * len(transfer.hashes) for _, transfer in transfers]
            self._count(transfers, verdicts, began_s)
            return Outcome(verdicts)
        call = self._read_part if self._direction == "load" else self._write_part
        lent, loans, futures = AtomicRevocable(), list[Loan](), list[Future[list[Verdict]]]()
        calls: list[list[tuple[int, Future[list[Verdict]]]]] = []
        try:
            with permit:
                for framed, transfer in transfers:
                    calls.append([])
                    for part in self._parts(framed, transfer, permit, deadline, lent):
                        loans.append(part.loan)
                        futures.append(self._executor.submit(partial(call, part), caller=permit))
                        calls[-1].append((len(part.hashes), futures[-1]))
                yield Waiting(futures, deadline)
            _take_back(lent, loans)
            if self.loans.waits:
                yield Waiting(futures, None)
        except BaseException:  # an interrupt, even one of the lines above
            _take_back(lent, loans)
            if self.loans.waits:
                wait([future for future in futures if not future.cancel()])
            raise
        verdicts = [
            [verdict for pages, future in calls_of_one for verdict in _verdicts(future, pages)]
            for calls_of_one in calls
        ]
        self.conclude(permit, futures)
        self._count(transfers, verdicts, began_s)
        return Outcome(verdicts)

    def delete(
        self, wanted: Mapping[KeySpace, Sequence[str]], deadline: Deadline
    ) -> Generator[Waiting, None, list[str]]:
        """Remove pages of framed key spaces. Return the pages that are certainly gone."""
        began_s = time.monotonic()
        parts = [
            (framed, hashes[start : start + step])
            for framed, hashes in wanted.items()
            for step in [self.max_pages(len(hashes))]
            for start in range(0, len(hashes), step)
        ]
        if not parts:
            return []
        permit = self.guard.admit()
        if permit is None:
            pages = sum(len(hashes) for _, hashes in parts)
            self.state.note({Verdict.BREAKER_OPEN: pages}, began_s)
            return []
        with permit:
            futures: list[Future[list[bool] | Verdict]] = [
                self.submit(partial(self._delete_part, framed, hashes), permit, deadline)
                for framed, hashes in parts
            ]
            yield Waiting(futures, deadline)
        results = [result_of(future) for future in futures]
        self.conclude(permit, futures)
        tally: Counter[Verdict] = Counter()
        gone: list[str] = []
        for (_, hashes), result in zip(parts, results, strict=True):
            tally[result if isinstance(result, Verdict) else Verdict.OK] += len(hashes)
            if not isinstance(result, Verdict):
                gone += compress(hashes, result)
        self.state.note(tally, began_s)
        return gone

    def _parts(
        self,
        framed: KeySpace,
        transfer: Transfer,
        permit: Permit,
        deadline: Deadline,
        lent: AtomicRevocable,
    ) -> list[_Part]:
        """Split a transfer over the idle threads, or over more threads if the store is slow."""
        pages, s_per_page = len(transfer.hashes), self._latency.s_per_page(framed)
        long_calls = round(s_per_page * pages / _LONG_CALL_S)
        pieces = piece_count(
            pages,
            threads=min(self.threads, max(self.idle_threads, long_calls)),
            least=self._latency.min_transfer_pages(framed),
            most=self._storage.capabilities.fitting_pages(
                min(
                    self.loans.max_call_nbytes // framed.stored_nbytes,
                    int(_MAX_CALL_S / max(s_per_page, 1e-9)),
                ),
                framed.stored_nbytes,
            ),
        )
        failure: list[Verdict] = []
        return [
            _Part(
                framed,
                transfer.hashes[cut],
                Loan(transfer.pages[cut], lent),
                permit,
                deadline,
                failure,
            )
            for cut in even_cuts(pages, pieces)
        ]

    # --- in the lane's threads -----------------------------------------------------------------------

    def _read_part(self, part: _Part) -> list[Verdict]:
        """Read pages, and check the frame of each page that the storage returned."""
        framed, hashes = part.framed, part.hashes
        lent = self.loans.to_read(framed, len(hashes), part.loan, part.deadline)
        with self._call(part), lent as pages:
            skip = len(pages[0].header) if self._checksum else None
            stored = [page.stored for page in pages]
            for target in stored:
                target.digest, target.digest_skip = None, skip
            hits = checked_answers(self._storage.batch_get(framed, hashes, stored), len(hashes))
            found = [index for index, hit in enumerate(hits) if hit]
            checksums: Sequence[int | None] = [stored[index].digest for index in found]
            if self._checksum and None in checksums:
                checksums = completed_checksums([pages[index] for index in found], checksums)
                if None in checksums:
                    raise RevokedError
            verdicts = [Verdict.MISS] * len(hits)
            for index in unanswered_in(hits):
                verdicts[index] = Verdict.PART_UNAVAILABLE
            for index in found:
                verdicts[index] = Verdict.OK
            errors = Framing(framed, checksum=self._checksum).errors(
                [pages[index] for index in found], [hashes[index] for index in found], checksums
            )
            for index, error in errors.items():
                logger.warning("a stored page is wrong and will be deleted: %s", error)
                verdicts[found[index]] = Verdict(error.reason)
            right = [index for index in found if verdicts[index] is Verdict.OK]
            self.loans.take_read(pages, right, part.loan)
        return verdicts

    def _write_part(self, part: _Part) -> list[Verdict]:
        framed, hashes = part.framed, part.hashes
        lent = self.loans.to_write(framed, len(hashes), part.loan, part.deadline)
        with self._call(part):
            if not self._spaces.ensure(framed):
                raise NotTriedError(Verdict.UNAVAILABLE)
            with lent as pages:
                Framing(framed, checksum=self._checksum).write(pages, hashes)
                stored = [page.stored for page in pages]
                answers = self._storage.batch_set(framed, hashes, stored)
            accepted = checked_answers(answers, len(hashes))
        return [Verdict.OK if ok else Verdict.REFUSED for ok in accepted]

    def _delete_part(self, framed: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return checked_answers(self._storage.batch_delete(framed, hashes), len(hashes))

    @contextmanager
    def _call(self, part: _Part) -> Generator[None]:
        """Count one storage call of a transfer, and record its duration or its failure.

        Raises:
            NotTriedError: The store did not answer another part, or nobody waits for the call any more.
        """
        call = self.guard.begin(part.permit)
        try:
            if part.failure:
                raise NotTriedError(part.failure[0])
            if part.deadline.passed():  # the caller may reuse the pages
                raise NotTriedError
            yield
            self._latency.note(part.framed, len(part.hashes), time.monotonic() - call.began_s)
        except (RevokedError, NoMemoryError) as error:  # this says nothing about the store
            raise NotTriedError from error
        except (StorageUnavailable, StorageTimeout) as error:
            part.failure.append(verdict_for(error))
            raise
        finally:
            self.guard.end(call)

    # --- calls ---------------------------------------------------------------------------------------

    def submit(
        self,
        task: Callable[[], T],
        permit: Permit | None = None,
        deadline: Deadline | None = None,
    ) -> Future[T]:
        """Run one storage call on a thread, before those that move pages. `permit` is that of the page
        store's call, if it has one.

        A call that a thread would begin after the deadline fails with NotTriedError.
        """
        return self._executor.submit(
            partial(self._run_counted, task, permit, deadline), caller=permit, is_urgent=True
        )

    def conclude(
        self, permit: Permit, futures: Sequence[Future[Any]], hang_s: float | None = None
    ) -> None:
        """Report to the breaker that a call has ended: its deadline has passed or its futures are done.

        Storage calls may still run because the call's deadline was shorter than `timeout_s`, or because
        they began late. If nothing else failed, the breaker gets the report when they have ended. A
        store that does not answer one of them for `hang_s` counts as hung.
        """
        successes = [_success(future) for future in futures]
        if hang_s is not None and self._hangs(permit, futures, hang_s):
            permit.fail(hung=True)
        elif False in successes:
            permit.fail()
        elif None not in successes:
            permit.succeed()
        elif self._is_late(permit, self._timeout_s):
            permit.fail()
        else:
            call_when_done(futures, lambda: _conclude_late(permit, futures))

    def _run_counted(
        self, task: Callable[[], T], permit: Permit | None, deadline: Deadline | None
    ) -> T:
        if deadline is not None and deadline.passed():  # other calls need the thread
            raise NotTriedError
        call = self.guard.begin(permit)
        try:
            return task()
        finally:
            self.guard.end(call)

    def _hangs(self, permit: Permit, futures: Sequence[Future[Any]], hang_s: float) -> bool:
        """Return whether the store answered with a timeout, or has not answered for `hang_s`.

        A storage call that never began says nothing by itself: overdue calls of other callers may occupy
        all threads.
        """
        if any(isinstance(_error(future), StorageTimeout) for future in futures):
            return True
        if all(_success(future) is not None for future in futures):
            return False
        return self._is_late(permit, hang_s)

    def _is_late(self, permit: Permit, timeout_s: float) -> bool:
        """Return whether a call of `permit` has run for `timeout_s`, or any other one for too long."""
        since_s = time.monotonic() - _MOST * timeout_s
        own = self.guard.of(permit)
        return any(call.began_s <= since_s for call in own) or bool(self.guard.overdue())

    def _count(
        self,
        transfers: Sequence[FramedTransfer],
        verdicts: list[list[Verdict]],
        began_s: float,
    ) -> None:
        direction = self._direction
        total: Counter[Verdict] = Counter()
        for (_, transfer), per_page in zip(transfers, verdicts, strict=True):
            tally = _tally(per_page)
            for verdict, pages in tally.items():
                self._counters.add(pages_counter(direction, verdict), pages)
                total[verdict] += pages
            ok_nbytes = tally.get(Verdict.OK, 0) * transfer.space.page_nbytes
            self._counters.add(nbytes_counter(direction), ok_nbytes)
        self.state.note(total, began_s)
        self._durations.note(direction, total, time.monotonic() - began_s)


class Lanes:
    """The two lanes of a page store in one process, for reads and writes. Thread-safe."""

    def __init__(self, spaces: OpenSpaces, settings: PageStoreSettings) -> None:
        self.spaces: OpenSpaces = spaces
        self.counters: Counters = Counters()
        self.durations: CallDurations = CallDurations()
        self.reads: Lane = Lane("load", spaces, settings, self.counters, self.durations)
        self.writes: Lane = Lane("save", spaces, settings, self.counters, self.durations)
        self.both: tuple[Lane, Lane] = (self.reads, self.writes)
        self.breakers: Breakers = Breakers(self.reads.guard.breaker, self.writes.guard.breaker)
        self.exists_latency: LatencyEstimator = LatencyEstimator(first_estimate_s=_FIRST_EXISTS_S)
        self.calls: Calls = Calls()

    def close(self, timeout_s: float) -> None:
        """End the threads. A storage call that still runs after `timeout_s` is left behind."""
        deadline = Deadline(timeout_s)
        self.calls.close()
        for lane in self.both:
            if not lane.close(max(_MIN_CLOSE_S, deadline.remaining_s())):
                logger.warning(
                    "a storage call has not ended after %.0f s, and nobody waits for it any more",
                    timeout_s,
                )


def result_of(future: Future[T]) -> T | Verdict:
    """Return the result of a storage call, or a verdict if there is no result after the wait."""
    if not future.done() or future.cancelled():
        return Verdict.TIMEOUT
    error = future.exception()
    if isinstance(error, NotTriedError):
        return error.verdict
    return future.result() if error is None else verdict_for(error)


def verdict_for(error: BaseException) -> Verdict:
    """Return the verdict for an error that a storage raised. Log it if it is unexpected."""
    if isinstance(error, StorageTimeout):
        return Verdict.TIMEOUT
    if isinstance(error, StorageUnavailable):
        return Verdict.UNAVAILABLE
    # A backend is responsible for the text of its own errors. But the client library's errors that
    # caused them may quote URLs with credentials, so the log shows only the last error's traceback.
    alone = Exception(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    expected = isinstance(error, HiCacheError)
    logger.warning("a storage call failed: %s", error, exc_info=None if expected else alone)
    return Verdict.ERROR


def checked_answers(answers: Sequence[object], length: int) -> list[bool]:
    """Return a storage's answers, which may be `PartialAnswers`. Only True itself counts as True.

    Raises:
        ValueError: There are not `length` answers, so it is unknown which page each belongs to.
    """
    if len(answers) != length:
        raise ValueError(f"the storage returned {len(answers)} results for {length} pages")
    if isinstance(answers, PartialAnswers):
        return answers
    return [answer is True for answer in answers]


def _error(future: Future[Any]) -> BaseException | None:
    return future.exception() if future.done() and not future.cancelled() else None


def _success(future: Future[Any]) -> bool | None:
    """Return True if a storage call succeeded, False if it failed, None if it has not ended."""
    if not future.done() or future.cancelled() or isinstance(_error(future), NotTriedError):
        return None
    return _error(future) is None


def _conclude_late(permit: Permit, futures: Sequence[Future[Any]]) -> None:
    successes = [_success(future) for future in futures]
    if False in successes:
        permit.fail()
    elif True in successes:
        permit.succeed()
    else:
        permit.dismiss()


def _take_back(lent: AtomicRevocable, loans: Sequence[Loan]) -> None:
    """End the loans of a call. Nothing touches its pages when this returns."""
    lent.revoke()
    for loan in loans:
        loan.drop()


def _tally(verdicts: list[Verdict]) -> dict[Verdict, int]:
    """Count the pages of each verdict. The usual case, in which all pages are OK, is fast."""
    if verdicts.count(Verdict.OK) == len(verdicts):
        return {Verdict.OK: len(verdicts)}
    return Counter(verdicts)


def _verdicts(future: Future[list[Verdict]], pages: int) -> list[Verdict]:
    result = result_of(future)
    return [result] * pages if isinstance(result, Verdict) else result
