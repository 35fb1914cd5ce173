"""Run an engine's loads or stores in separate threads, piece by piece."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from hicache_storage.backend_support.counters import Counters
from hicache_storage.integrations._transfer_job import Piece, TransferJob
from hicache_storage.page_store.observer import NO_ACTIVITY
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.integrations._job_results import JobResult, ResultQueue
    from hicache_storage.integrations._spaces import SpaceOpener
    from hicache_storage.integrations._write_admission import WriteAdmission
    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store.observer import Activity, Attributes
    from hicache_storage.page_store.results import Outcome, Transfer

    Move: TypeAlias = Callable[..., Outcome]
    """`PageStore.load` or `PageStore.save`."""

logger = logging.getLogger(__name__)

# A piece has at most this many bytes, so a thread moves a small job in one turn.
_SMALL_NBYTES = 32 << 20
_MAX_PIECE_PAGES = 1024
_SMALL, _LARGE = "small", "large"


class TransferLimits(NamedTuple):
    """The limits for one direction: loads or stores."""

    large: int
    """How many pieces of large jobs are moved at the same time."""
    small: int
    """How many small jobs are moved at the same time."""
    threads: int
    """The number of threads. Spare threads move small jobs while large jobs use up their own share."""
    timeout_s: float
    """The deadline of a job, from its submission."""
    queued_nbytes: int | None = None
    """The limit for the payload bytes of waiting jobs. A job that exceeds it is dropped, unless no other
    job waits. None: no limit."""


class TransferQueue:
    """The loads or the stores of a runner. Thread-safe.

    The threads `hicache-load-N` or `hicache-store-N` take jobs in order, split them into pieces, and
    move one piece at a time. No piece of this queue begins while jobs of the queue `before` wait for a
    thread. A thread waits for the store at most until the deadline of its piece, and waiting jobs have
    later deadlines, so a thread takes each job before its deadline passes. Small jobs overtake waiting
    large jobs, so a small job does not wait for a large job that a slow store cannot move in time.
    """

    def __init__(
        self,
        results: ResultQueue[JobResult],
        move: Move,
        limits: TransferLimits,
        begin_activity: Callable[[str, Attributes], Activity],
        *,
        spaces: SpaceOpener | None = None,
        before: TransferQueue | None = None,
        admission: WriteAdmission | None = None,
    ) -> None:
        self.counters = Counters()
        self.waiting_nbytes = 0
        """The payload bytes of the jobs that no thread has taken. `TransferLimits` may limit them."""
        self._results = results
        self._name = results.kind.value
        self._move = move
        self._spaces = spaces
        self._limits = limits
        self._begin_activity = begin_activity
        self._before = before
        self._admission = admission
        self._when_empty: Callable[[], None] | None = None
        self._changed = threading.Condition()
        self._waiting: deque[TransferJob | Piece] = deque()
        self._running = {_SMALL: 0, _LARGE: 0}
        self._closed = self._gives_up = False
        if before is not None:
            before.call_when_empty(self._wake)
        for number in range(limits.threads):
            name = f"hicache-{self._name}-{number}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    @property
    def has_waiting(self) -> bool:
        """True while a job or a piece waits for a thread."""
        return bool(self._waiting)

    def call_when_empty(self, callback: Callable[[], None]) -> None:
        """Call `callback`, from any thread, each time the last waiting piece is taken."""
        self._when_empty = callback

    # --- the engine's thread -------------------------------------------------------------------------

    def submit(self, job_id: int, batches: Sequence[Transfer]) -> None:
        """Add a job. The call never blocks. After `stop`, the pages are UNAVAILABLE at once.

        If the job does not fit in the queue, its pages are REFUSED at once.
        """
        activity = self._begin_activity(f"{self._name}_job", {})
        job = TransferJob(job_id, batches, self._limits.timeout_s, activity)
        job.nbytes = _payload_nbytes(batches)
        self._results.begin()
        with self._changed:
            is_admitted = not self._closed and self._has_room(job.nbytes)
            if is_admitted:
                self.waiting_nbytes += job.nbytes
                self._waiting.append(job)
                self._changed.notify()
        if not is_admitted:
            self._drop(job)

    def stop(self, *, gives_up: bool) -> None:
        """End the threads after the waiting jobs. With `gives_up`, fail the waiting jobs instead."""
        with self._changed:
            self._closed = True
            self._gives_up = self._gives_up or gives_up
            self._changed.notify_all()

    def _has_room(self, nbytes: int) -> bool:
        limit_nbytes = self._limits.queued_nbytes
        is_alone = not self.waiting_nbytes
        return limit_nbytes is None or is_alone or self.waiting_nbytes + nbytes <= limit_nbytes

    def _drop(self, job: TransferJob) -> None:
        if not self._closed:
            self.counters.add(f"{self._name}_jobs_dropped")
        self._give_up(job, Verdict.UNAVAILABLE if self._closed else Verdict.REFUSED)

    # --- the threads ---------------------------------------------------------------------------------

    def _work(self) -> None:
        while (item := self._next()) is not None:
            if isinstance(item, TransferJob):
                self._begin(item)
            else:
                self._move_piece(item)
            with self._changed:
                self._running[_size_of(item)] -= 1
            del item  # or this thread would keep the pages in memory while it waits

    def _next(self) -> TransferJob | Piece | None:
        with self._changed:
            # Read the time only once. If a deadline passed between two readings, the wait would not end.
            while (held_s := self._held_back_s()) or (place := self._first_to_begin()) is None:
                if self._closed and not self._waiting:
                    return None
                self._changed.wait(held_s)
            item = self._waiting[place]
            del self._waiting[place]
            if isinstance(item, TransferJob):
                self.waiting_nbytes -= item.nbytes
            size = _size_of(item)
            self._running[size] += 1
            if self._closed or (size == _LARGE and self._running[size] == self._limits.large):
                self._changed.notify_all()  # the spare threads may move small jobs now
        self._tell_if_empty()
        return item

    def _first_to_begin(self) -> int | None:
        """Return the position of the first job or piece that may begin now."""
        limits, large = self._limits, self._running[_LARGE]
        has_room = {
            _LARGE: large < limits.large,
            _SMALL: large >= limits.large or self._running[_SMALL] < limits.small,
        }
        return next((n for n, item in enumerate(self._waiting) if has_room[_size_of(item)]), None)

    def _held_back_s(self) -> float | None:
        """Return how long the queue `before` may still delay this queue, or None if it does not."""
        if not self._waiting or self._before is None or not self._before.has_waiting:
            return None
        first = _job_of(self._waiting[0])
        return None if first.failure is not None else first.deadline.remaining_s() or None

    def _tell_if_empty(self) -> None:
        if not self._waiting and self._when_empty is not None:
            self._when_empty()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _begin(self, job: TransferJob) -> None:
        try:
            self._admit(job)
            pieces = job.split(_piece_pages)
        except Exception as error:  # noqa: BLE001 - an error of the engine fails its own job
            logger.warning("a %s is malformed: %s: %s", self._name, type(error).__name__, error)
            self._give_up(job, Verdict.ERROR)
            return
        if not pieces:
            self._report(job)
            return
        with self._changed:
            self._waiting.extendleft(reversed(pieces))
            self._changed.notify(len(pieces))

    def _admit(self, job: TransferJob) -> None:
        """Drop the pages of a store that are not admitted."""
        if self._admission is None or not self._admission.is_enabled:
            return
        admitted: list[list[bool]] = []
        for batch in job.batches:
            space = batch.space
            self._admission.start(space)
            admitted.append(self._admission.admit(batch.hashes, space.page_nbytes, space.id))
        job.keep(admitted)
        refused = sum(kept.count(False) for kept in admitted)
        self.counters.add(f"{self._name}_pages_{Verdict.NOT_ADMITTED.value}", refused)

    def _move_piece(self, piece: Piece) -> None:
        try:
            refusal = self._refusal(piece)
            if refusal is None:
                with piece.job.activity.resume():
                    left_s = piece.job.deadline.remaining_s()
                    outcome = self._move([piece.pages], timeout_s=left_s)
                self._end(piece, outcome.verdicts[0])
                return
        except BaseException:
            logger.exception("a %s failed", self._name)
            refusal = Verdict.ERROR
        self._end(piece, piece.verdicts(refusal))

    def _refusal(self, piece: Piece) -> Verdict | None:
        """Return the verdict of a piece that must not be moved, or None for a piece to move."""
        job = piece.job
        if self._gives_up:
            return Verdict.UNAVAILABLE
        if job.failure is not None:
            return job.failure
        if job.deadline.passed():
            return Verdict.TIMEOUT
        if self._spaces is not None and not self._spaces.open(piece.space, job.deadline):
            return Verdict.TIMEOUT if job.deadline.passed() else Verdict.UNAVAILABLE
        return None

    def _end(self, piece: Piece, verdicts: Sequence[Verdict]) -> None:
        self._count(verdicts)
        if piece.job.record(piece, verdicts):
            self._report(piece.job)

    def _give_up(self, job: TransferJob, verdict: Verdict) -> None:
        try:
            job.give_up(verdict)
            for batch in job.batches:
                self._count([verdict] * len(batch.hashes))
        except Exception:
            logger.exception("%s %r is malformed", self._name, job.job_id)
        self._report(job)

    def _count(self, verdicts: Sequence[Verdict]) -> None:
        for verdict, pages in Counter(verdicts).items():
            self.counters.add(f"{self._name}_pages_{verdict.value}", pages)

    def _report(self, job: TransferJob) -> None:
        self.counters.add(f"{self._name}_jobs")
        result = job.result()
        try:
            if job.activity is not NO_ACTIVITY:
                job.activity.end(_attributes(result))
        finally:
            self._results.finish(result)


def _job_of(item: TransferJob | Piece) -> TransferJob:
    return item if isinstance(item, TransferJob) else item.job


def _size_of(item: TransferJob | Piece) -> str:
    return _SMALL if _job_of(item).nbytes <= _SMALL_NBYTES else _LARGE


def _piece_pages(space: KeySpace) -> int:
    return max(1, min(_MAX_PIECE_PAGES, _SMALL_NBYTES // space.page_nbytes))


def _attributes(result: JobResult) -> Attributes:
    tally = Counter(verdict for verdicts in result.verdicts for verdict in verdicts)
    return {
        "pages": sum(tally.values()),
        "nbytes": result.nbytes,
        **{f"pages.{verdict.value}": pages for verdict, pages in tally.items()},
    }


def _payload_nbytes(batches: Sequence[Transfer]) -> int:
    """Return the payload bytes of a job, or 0 if it is malformed, which a thread reports later."""
    try:
        return sum(len(batch.hashes) * batch.space.page_nbytes for batch in batches)
    except Exception:  # noqa: BLE001 - no error reaches the engine's thread
        return 0
