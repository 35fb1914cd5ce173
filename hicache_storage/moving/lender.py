"""Let a page store access an engine's pages, by lending the pages or by copying them.

An engine reuses its memory soon after a call returns, but a store's call may outlast its deadline. A
bounded store gets the engine's pages until its call settles (`LentPages`). A revocable one gets them
until the deadline (`RevocablePages`). Any other store gets copies (`CopiedPages`). Copies, and headers
that the engine does not provide, are in our own buffers. An overdue call keeps its buffer.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, islice
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

from hicache_storage import native
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.executor import DaemonExecutor, when_all_done
from hicache_storage.backend_support.revocable import AtomicRevocable
from hicache_storage.backend_support.shared_resource import CallGate
from hicache_storage.moving.buffers import stride_nbytes
from hicache_storage.page_store.frame import FramedPage
from hicache_storage.page_store.results import Outcome, Transfer, Verdict
from hicache_storage.page_store.splitting import even_cuts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.moving.buffers import Buffer, Buffers
    from hicache_storage.page import Page
    from hicache_storage.page_store import PageStore
    from hicache_storage.page_store.counters import Direction

    Batches: TypeAlias = "Sequence[PageBatch] | Sequence[Transfer]"
    """The pages of one move, all of the same size. Transfers have their own headers."""

_MAX_MOVE_NBYTES = 32 << 20
_MAX_MOVE_PAGES = 1024
# A part of a large move: its copy and its storage call take a few milliseconds each.
_PART_NBYTES = 16 << 20
# The limit of the buffers leaves room for this many moves, so that threads can work in parallel.
_MOVES = 8
_UNHASHED = -1


@dataclass(frozen=True, slots=True)
class PageBatch:
    """Pages of one key space in the engine's memory."""

    space: KeySpace
    """The key space of the payload, without a frame."""
    hashes: Sequence[str]
    pages: Sequence[Page]
    """The payload of each hash. The lender adds headers in its own memory."""


class Lender(ABC):
    """A way to load or to save an engine's pages. Thread-safe."""

    lends: ClassVar[bool] = True
    """True if the store itself accesses the engine's pages."""

    def __init__(
        self,
        store: PageStore,
        direction: Direction,
        buffers: Buffers,
        *,
        engine: CallGate | None = None,
        settle_s: float = 0.0,
    ) -> None:
        """Make a lender.

        Args:
            store: The page store. The key spaces of the pages must be open.
            direction: `load` or `save`.
            buffers: For headers and copies.
            engine: The counter of calls and copies that may touch the engine's memory.
            settle_s: The longest time that a call of a bounded store takes from start to settling.
        """
        self.buffers = buffers
        self._store = store
        self._loads = direction == "load"
        self._frame_nbytes = store.frame_nbytes
        self._engine = engine or CallGate()
        self._settle_s = settle_s

    @abstractmethod
    def move(self, batches: Batches, deadline: Deadline | None = None) -> Outcome | None:
        """Move pages. The engine's memory is free as soon as the outcome has settled.

        Return None, without calling the store, if no buffer is free by the deadline. Without a deadline
        the store's own time limit applies, and the call does not wait for a buffer. If `engine` is
        closed, the pages are UNAVAILABLE.

        Raises:
            Exception: The move failed, and nothing touches the engine's memory any more.
        """

    def close(self) -> None:
        """Release the buffers."""
        self.buffers.close()

    def max_pages(self, space: KeySpace) -> int:
        """Return the most pages that one move may have."""
        limit_nbytes, nbytes = self.buffers.limit_nbytes, _MAX_MOVE_NBYTES
        if limit_nbytes is not None:
            nbytes = min(nbytes, limit_nbytes // _MOVES)
        stride = stride_nbytes(space.page_nbytes, self._frame_nbytes)
        return max(1, min(_MAX_MOVE_PAGES, nbytes // stride))

    def can_move(self, space: KeySpace) -> bool:
        """Return True if one page of `space` fits in the buffers."""
        limit_nbytes = self.buffers.limit_nbytes
        return limit_nbytes is None or self._buffer_nbytes(space, 1) <= limit_nbytes

    def _buffer_nbytes(self, space: KeySpace, pages: int) -> int:
        """Return the size of the buffer of a move.

        With a limit, all moves of a key space use one size.
        """
        if self.buffers.limit_nbytes is not None:
            pages = max(pages, self.max_pages(space))
        frame = self._frame_nbytes
        return pages * (frame if self.lends else stride_nbytes(space.page_nbytes, frame))

    def _acquire(self, batches: Batches, deadline: Deadline | None) -> Buffer | None:
        pages = sum(len(batch.hashes) for batch in batches)
        timeout_s = 0.0 if deadline is None else deadline.remaining_s()
        return self.buffers.acquire(self._buffer_nbytes(batches[0].space, pages), timeout_s)

    def _lent(
        self, batches: Batches, buffer: Buffer, revocable: AtomicRevocable | None = None
    ) -> list[Transfer]:
        """Return transfers of the engine's own pages, with headers in `buffer`."""
        pages = sum(len(batch.hashes) for batch in batches)
        headers = iter(buffer.headers(self._frame_nbytes, pages))
        return [
            Transfer(
                batch.space,
                batch.hashes,
                [
                    FramedPage(header, page, revocable)
                    for page, header in zip(_payloads(batch), headers, strict=False)
                ],
            )
            for batch in batches
        ]

    def _refused(self, batches: Batches, buffer: Buffer | None) -> Outcome:
        """Return the outcome for a move that begins after the engine took its memory back."""
        if buffer is not None:
            self.buffers.release(buffer)
        verdicts = [[Verdict.UNAVAILABLE] * len(batch.hashes) for batch in batches]
        return Outcome(verdicts, when_all_done([]))


class LentPages(Lender):
    """A lender for a bounded store or a waiting engine: it lends pages until the call settles."""

    def move(self, batches: Batches, deadline: Deadline | None = None) -> Outcome | None:
        buffer = None
        transfers = [batch for batch in batches if isinstance(batch, Transfer)]
        if not transfers:
            buffer = self._acquire(batches, deadline)
            if buffer is None:
                return None
            transfers = self._lent(batches, buffer)
        if not self._engine.begin():
            return self._refused(batches, buffer)
        call = self._store.load if self._loads else self._store.save
        try:
            outcome = call(transfers, timeout_s=_remaining_s(deadline))
        except (TypeError, ValueError):  # the page store refused its arguments, and no call began
            self._end(buffer)
            raise
        except BaseException:  # a call may have begun: wait for its end, never reuse its headers
            threading.Event().wait(self._settle_s)
            self._engine.end()
            raise
        outcome.settled.add_done_callback(lambda _: self._end(buffer))
        return outcome

    def _end(self, buffer: Buffer | None) -> None:
        if buffer is not None:
            self.buffers.release(buffer)
        self._engine.end()


class RevocablePages(Lender):
    """A lender for a revocable store: it lends pages until the deadline.

    An overdue call keeps only the headers.
    """

    def move(self, batches: Batches, deadline: Deadline | None = None) -> Outcome | None:
        buffer = self._acquire(batches, deadline)
        if buffer is None:
            return None
        if not self._engine.begin():
            return self._refused(batches, buffer)
        revocable = AtomicRevocable()
        call = self._store.load if self._loads else self._store.save
        try:
            transfers = self._lent(batches, buffer, revocable)
            outcome = call(transfers, timeout_s=_remaining_s(deadline))
        except (TypeError, ValueError):  # the page store refused its arguments, and no call began
            self.buffers.release(buffer)
            raise  # after any other error, a call may have begun, and keeps the buffer
        finally:
            revocable.revoke()
            self._engine.end()
        self.buffers.release(buffer, outcome.settled)
        return _settled(outcome)


class CopiedPages(Lender):
    """A lender for any store: the calling thread copies the pages. An overdue call keeps its copies."""

    lends = False

    def move(self, batches: Batches, deadline: Deadline | None = None) -> Outcome | None:
        buffer = self._acquire(batches, deadline)
        if buffer is None:
            return None
        pages = [page for batch in batches for page in _payloads(batch)]
        page_nbytes = batches[0].space.page_nbytes
        frames = buffer.frames(page_nbytes, self._frame_nbytes, len(pages))
        copies = [frame.payload for frame in frames]
        left = iter(frames)
        transfers = [
            Transfer(batch.space, batch.hashes, list(islice(left, len(batch.hashes))))
            for batch in batches
        ]
        call = self._store.load if self._loads else self._store.save
        try:
            if not self._loads:
                hashed = self._store.settings.checksum == "xxh3"
                digests = self._copy(copies, pages, 0 if hashed else _UNHASHED)
                if digests is None:
                    return self._refused(batches, buffer)
                for copy, digest in zip(copies, digests, strict=False):
                    copy.digest = digest
            outcome = call(transfers, timeout_s=_remaining_s(deadline))
        except (TypeError, ValueError):  # a page or an argument is malformed, and no call began
            self.buffers.release(buffer)
            raise  # after any other error, a call may have begun, and keeps the buffer
        try:
            if self._loads:
                whole = outcome.whole() * len(batches)
                targets, sources = compress(pages, whole), compress(copies, whole)
                if self._copy(list(targets), list(sources), _UNHASHED) is None:
                    return self._refused(batches, None)
        finally:
            self.buffers.release(buffer, outcome.settled)
        return _settled(outcome)

    def _copy(
        self, targets: Sequence[Page], sources: Sequence[Page], skip: int
    ) -> list[int] | None:
        """Copy pages from or to the engine's memory.

        Returns:
            The result of `native.copy_pages` for `skip`, or None if the engine's memory is closed.
        """
        if not self._engine.begin():
            return None
        try:
            return native.copy_pages(
                [page.segments for page in targets],
                [page.segments for page in sources],
                skip,
                True,
            )
        finally:
            self._engine.end()


class ParallelCopies(CopiedPages):
    """A lender that splits a large move, so that it copies one part while the store moves another."""

    def __init__(self, store: PageStore, direction: Direction, buffers: Buffers) -> None:
        super().__init__(store, direction, buffers)
        settings = store.settings
        self._timeout_s = settings.timeout_s if self._loads else settings.writes_s
        threads = store.storage.capabilities.parallelism
        self._executor = DaemonExecutor(f"hicache-copy-{direction}", threads)

    def move(self, batches: Batches, deadline: Deadline | None = None) -> Outcome | None:
        pages = len(batches[0].hashes)
        nbytes = pages * batches[0].space.page_nbytes
        parts = list(even_cuts(pages, max(1, min(pages, nbytes // _PART_NBYTES))))
        if len(parts) == 1:
            return super().move(batches, deadline)
        deadline = deadline or Deadline(self._timeout_s)
        moves = [
            self._executor.submit(partial(self._move_part, _cut(batches, part), deadline))
            for part in parts
        ]
        wait(moves)  # even if one has failed, because the others touch the engine's memory
        verdicts: list[list[Verdict]] = [[] for _ in batches]
        for part, move in zip(parts, moves, strict=True):
            outcome = move.result()
            none = [[Verdict.UNAVAILABLE] * (part.stop - part.start)] * len(batches)
            for known, more in zip(verdicts, outcome.verdicts if outcome else none, strict=True):
                known.extend(more)
        return Outcome(verdicts, when_all_done([]))

    def _move_part(self, batches: Batches, deadline: Deadline) -> Outcome | None:
        return None if deadline.passed() else super().move(batches, deadline)

    def close(self) -> None:
        super().close()
        self._executor.close(0)


def _cut(batches: Batches, part: slice) -> Batches:
    """Return the same part of each batch. All of them have the same hashes."""
    cut: list[Any] = [
        replace(cast("Any", one), hashes=one.hashes[part], pages=one.pages[part]) for one in batches
    ]
    return cut


def _settled(outcome: Outcome) -> Outcome:
    """Return the outcome as settled: the engine's memory is free, although a call may go on."""
    is_settled = outcome.settled.done()
    return outcome if is_settled else Outcome(outcome.verdicts, when_all_done([]))


def _remaining_s(deadline: Deadline | None) -> float | None:
    return None if deadline is None else deadline.remaining_s()


def _payloads(batch: PageBatch | Transfer) -> Sequence[Page]:
    return [page.payload for page in batch.pages] if isinstance(batch, Transfer) else batch.pages
