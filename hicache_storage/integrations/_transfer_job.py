"""A load or a store of an engine, split into pieces."""

from __future__ import annotations

import threading
import time
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.integrations._job_results import JobResult
from hicache_storage.page_store.observer import NO_ACTIVITY, Activity
from hicache_storage.page_store.results import Transfer, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.keys import KeySpace

_UNANSWERED = frozenset((Verdict.TIMEOUT, Verdict.UNAVAILABLE, Verdict.BREAKER_OPEN))


class TransferJob:
    """A load or a store that is under way. Thread-safe."""

    def __init__(
        self,
        job_id: int,
        batches: Sequence[Transfer],
        timeout_s: float,
        activity: Activity = NO_ACTIVITY,
    ) -> None:
        self.job_id = job_id
        self.activity = activity
        self.batches = batches
        self.deadline = Deadline(timeout_s)
        self.nbytes = 0
        """The payload bytes, which count toward the limit of the queue."""
        self.failure: Verdict | None = None
        """The verdict of the first page without an answer. Later pieces get this verdict untried."""
        self._verdicts: list[list[Verdict]] = []
        self._admitted: list[list[bool]] = []
        """For each submitted batch, True for each page that is moved. If empty, all pages are moved."""
        self._began_s = self.deadline.end_s - timeout_s
        self._lock = threading.Lock()
        self._pieces = 0
        self._moved_nbytes = 0

    def keep(self, admitted: list[list[bool]]) -> None:
        """Move only the `admitted` pages of each batch. The other pages get NOT_ADMITTED."""
        self.batches = [
            Transfer(
                batch.space, list(compress(batch.hashes, kept)), list(compress(batch.pages, kept))
            )
            for batch, kept in zip(self.batches, admitted, strict=True)
        ]
        self._admitted = admitted

    def split(self, piece_pages: Callable[[KeySpace], int]) -> list[Piece]:
        """Begin the job. Return its pieces, each of at most `piece_pages` pages of its key space.

        Raises:
            ValueError: A batch does not have exactly one page of its key space's size for each hash.
        """
        self._began_s = time.monotonic()
        self._verdicts = [[Verdict.ERROR] * len(batch.hashes) for batch in self.batches]
        pieces: list[Piece] = []
        for number, batch in enumerate(self.batches):
            pages, page_nbytes = len(batch.hashes), batch.space.page_nbytes
            if [page.nbytes for page in batch.pages] != [page_nbytes] * pages:
                raise ValueError(f"batch {number} needs {pages} pages of {page_nbytes} bytes")
            step = piece_pages(batch.space)
            pieces += [
                Piece(self, number, slice(start, min(start + step, pages)))
                for start in range(0, pages, step)
            ]
        self._pieces = len(pieces)
        return pieces

    def record(self, piece: Piece, verdicts: Sequence[Verdict]) -> bool:
        """Record the verdicts of a piece. Return True if it is the last piece."""
        moved = verdicts.count(Verdict.OK)
        failure = next(filter(_UNANSWERED.__contains__, verdicts), None)
        with self._lock:
            self.failure = self.failure or failure
            self._verdicts[piece.batch][piece.part] = verdicts
            self._moved_nbytes += moved * piece.space.page_nbytes
            self._pieces -= 1
            return not self._pieces

    def give_up(self, verdict: Verdict) -> None:
        """Give every page the same verdict. Call it only before a piece of the job has begun."""
        self._verdicts = [[verdict] * len(batch.hashes) for batch in self.batches]

    def result(self) -> JobResult:
        """Return the result. Call it only after the last piece."""
        elapsed_s = time.monotonic() - self._began_s
        verdicts = self._verdicts
        if self._admitted:
            verdicts = [
                _spread(of_batch, kept)
                for of_batch, kept in zip(verdicts, self._admitted, strict=True)
            ]
        return JobResult(self.job_id, verdicts, self._moved_nbytes, elapsed_s)


class Piece(NamedTuple):
    """A part of one batch of a job, which is moved by one call of the page store."""

    job: TransferJob
    batch: int
    part: slice

    @property
    def space(self) -> KeySpace:
        """The key space of the pages."""
        return self.job.batches[self.batch].space

    @property
    def pages(self) -> Transfer:
        """The pages of the piece."""
        whole = self.job.batches[self.batch]
        return Transfer(whole.space, whole.hashes[self.part], whole.pages[self.part])

    def verdicts(self, verdict: Verdict) -> list[Verdict]:
        """Return `verdict` for each page."""
        return [verdict] * (self.part.stop - self.part.start)


def _spread(verdicts: Sequence[Verdict], admitted: Sequence[bool]) -> list[Verdict]:
    """Return a verdict for each page of a batch, given those of the admitted pages."""
    moved = iter(verdicts)
    return [next(moved) if kept else Verdict.NOT_ADMITTED for kept in admitted]
