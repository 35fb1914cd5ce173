"""Moves of pieces of jobs between the engine's memory and a page store."""

from __future__ import annotations

import threading
from itertools import compress
from typing import TYPE_CHECKING

from hicache_storage import native
from hicache_storage.backend_support.revocable import AtomicRevocable
from hicache_storage.integrations._job_results import JobKind
from hicache_storage.integrations._private_memory import stride_nbytes
from hicache_storage.page import Page
from hicache_storage.page_store.results import Transfer, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from hicache_storage.backend_support.shared_resource import CallGate
    from hicache_storage.integrations._private_memory import PrivateMemory
    from hicache_storage.integrations._transfer_job import Piece
    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store import FramedPage, PageStore
    from hicache_storage.page_store.results import Outcome

_MAX_PIECE_NBYTES = 32 << 20
_MAX_PIECE_PAGES = 1024
# The limit of the private memory allows this many pieces, so that threads work at the same time.
_PIECES = 8
_UNHASHED = -1


class PieceMover:
    """One direction of a runner. Thread-safe.

    With lent memory the store itself accesses the engine's pages, and private memory holds the headers.
    A revocable store loses that access at the job's deadline, and the move ends. The move of any other
    store ends when its call has settled. Without lent memory, private memory holds whole pages, which
    the calling thread copies, and a move ends at its job's deadline. An overdue call keeps its private
    memory.
    """

    def __init__(
        self,
        kind: JobKind,
        store: PageStore,
        engine: CallGate,
        memory: PrivateMemory,
        *,
        lends_memory: bool,
        settle_s: float,
    ) -> None:
        """Make a mover.

        Args:
            kind: The direction.
            store: Has the key spaces of the pieces open.
            engine: Counts the calls and copies that may touch the engine's memory.
            memory: Holds headers and copies.
            lends_memory: True if the store itself accesses the engine's memory. It is revocable, or
                bounded.
            settle_s: A bounded store has settled every call this long after the call began.
        """
        self._loads = kind is JobKind.LOAD
        self._call = store.load if self._loads else store.save
        self._frame_nbytes = store.frame_nbytes
        self._hashed = 0 if store.settings.checksum == "xxh3" else _UNHASHED
        self._engine = engine
        self._memory = memory
        self._lends_memory = lends_memory
        self._revokes_memory = lends_memory and store.storage.capabilities.revocable
        self._settle_s = settle_s
        self._piece_nbytes = min(_MAX_PIECE_NBYTES, memory.limit_nbytes // _PIECES)

    def max_pages(self, space: KeySpace) -> int:
        """Return the most pages of a piece."""
        return max(1, min(_MAX_PIECE_PAGES, self._piece_nbytes // self._stride_nbytes(space)))

    def can_move(self, space: KeySpace) -> bool:
        """Return True if a page of `space` fits in the private memory."""
        return self._private_nbytes(space) <= self._memory.limit_nbytes

    def move(self, piece: Piece, done: Callable[[Sequence[Verdict]], None]) -> None:
        """Move a piece. Call `done` once nothing touches the engine's memory any more.

        Raises:
            Exception: The piece was not moved, and `done` will not be called.
        """
        if self._revokes_memory:
            done(self._move_revocable(piece))
        elif self._lends_memory:
            self._move_lent(piece, done)
        else:
            done(self._move_private(piece))

    def _move_revocable(self, piece: Piece) -> Sequence[Verdict]:
        buffer = self._memory.acquire(self._private_nbytes(piece.space), piece.job.deadline)
        if buffer is None:
            return piece.verdicts(Verdict.TIMEOUT)
        if not self._engine.begin():
            self._memory.release(buffer)
            return piece.verdicts(Verdict.UNAVAILABLE)
        revocable = AtomicRevocable()
        lent = [Page.of_views(page.segments, page.nbytes, revocable) for page in piece.pages]
        try:
            outcome = self._transfer(piece, buffer.frames_of(lent, self._frame_nbytes))
        except (TypeError, ValueError):  # the page store refused its arguments, and no call began
            self._memory.release(buffer)
            raise  # after any other error a call may have begun, and keeps the buffer
        finally:
            revocable.revoke()
            self._engine.end()
        self._memory.release(buffer, outcome.settled)
        return outcome.verdicts[0]

    def _move_lent(self, piece: Piece, done: Callable[[Sequence[Verdict]], None]) -> None:
        buffer = self._memory.acquire(self._private_nbytes(piece.space), piece.job.deadline)
        if buffer is None:
            done(piece.verdicts(Verdict.TIMEOUT))
            return
        if not self._engine.begin():
            self._memory.release(buffer)
            done(piece.verdicts(Verdict.UNAVAILABLE))
            return
        try:
            outcome = self._transfer(piece, buffer.frames_of(piece.pages, self._frame_nbytes))
        except (TypeError, ValueError):  # the page store refused its arguments, and no call began
            self._memory.release(buffer)
            self._engine.end()
            raise
        except BaseException:  # a call may have begun: it ends in time, and keeps its headers
            threading.Event().wait(self._settle_s)
            self._engine.end()
            raise

        def end(_: Future[None]) -> None:
            self._memory.release(buffer)
            self._engine.end()
            done(outcome.verdicts[0])

        outcome.settled.add_done_callback(end)

    def _move_private(self, piece: Piece) -> Sequence[Verdict]:
        space, pages = piece.space, piece.pages
        buffer = self._memory.acquire(self._private_nbytes(space), piece.job.deadline)
        if buffer is None:
            return piece.verdicts(Verdict.TIMEOUT)
        frames = buffer.frames(space.page_nbytes, self._frame_nbytes, len(pages))
        copies = [frame.payload.segments for frame in frames]
        payloads = [page.segments for page in pages]
        if not self._loads:
            digests = self._copy(copies, payloads, self._hashed)
            if digests is None:
                self._memory.release(buffer)
                return piece.verdicts(Verdict.UNAVAILABLE)
            for frame, digest in zip(frames, digests, strict=False):
                frame.payload.digest = digest
        try:
            outcome = self._transfer(piece, frames)
        except (TypeError, ValueError):  # the page store refused its arguments, and no call began
            self._memory.release(buffer)
            raise  # after any other error a call may have begun, and keeps the buffer
        verdicts = outcome.verdicts[0]
        try:
            if self._loads:
                moved = [verdict is Verdict.OK for verdict in verdicts]
                targets, sources = compress(payloads, moved), compress(copies, moved)
                if self._copy(list(targets), list(sources), _UNHASHED) is None:
                    return piece.verdicts(Verdict.UNAVAILABLE)
        finally:
            self._memory.release(buffer, outcome.settled)
        return verdicts

    def _transfer(self, piece: Piece, frames: Sequence[FramedPage]) -> Outcome:
        transfer = Transfer(piece.space, piece.hashes, frames)
        return self._call([transfer], timeout_s=piece.job.deadline.remaining_s())

    def _copy(
        self,
        targets: Sequence[tuple[memoryview, ...]],
        sources: Sequence[tuple[memoryview, ...]],
        skip: int,
    ) -> list[int] | None:
        """Copy pages from or to the engine's memory.

        Returns:
            What `native.copy_pages` returns for `skip`. None if that memory may not be used any more.
        """
        if not self._engine.begin():
            return None
        try:
            return native.copy_pages(targets, sources, skip)
        finally:
            self._engine.end()

    def _stride_nbytes(self, space: KeySpace) -> int:
        return stride_nbytes(space.page_nbytes, self._frame_nbytes)

    def _private_nbytes(self, space: KeySpace) -> int:
        """Return the size of the buffer of a piece, which is the same for all pieces of a key space."""
        page_nbytes = self._frame_nbytes if self._lends_memory else self._stride_nbytes(space)
        return self.max_pages(space) * page_nbytes
