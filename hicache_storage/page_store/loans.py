"""Decide which memory a storage call gets: the caller's pages on loan, or a private copy.

A call of the page store lends the caller's memory, and takes it back when it returns or raises. A
storage that is `revocable` gets the pages themselves. Any other storage gets private memory, and the
thread that calls it copies the pages, as long as the loan lasts. So nothing touches the caller's memory
afterwards, however late the storage is. Source: Linux, rust/kernel/revocable.rs.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import repeat
from typing import TYPE_CHECKING

from hicache_storage import native
from hicache_storage.backend_support.copies import new_memory
from hicache_storage.backend_support.revocable import RevokedError
from hicache_storage.page_store.frame import FramedPage, frame_nbytes
from hicache_storage.page_store.page_memory import PageMemory, stride_nbytes

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.backend_support.revocable import AtomicRevocable
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.page_store.settings import PageStoreSettings
    from hicache_storage.storage import HiCacheStorage

_MAX_LENT_NBYTES = 32 << 20
_MAX_PRIVATE_NBYTES = 16 << 20
# The limit of the private memory leaves room for this many storage calls at the same time.
_PRIVATE_CALLS = 8
_UNHASHED = -1


class NoMemoryError(Exception):
    """Other storage calls use the private memory."""


class Loan:
    """The caller's pages of one storage call, until they are taken back. Thread-safe."""

    __slots__ = ("_pages", "revocable")

    def __init__(self, pages: Sequence[Page], revocable: AtomicRevocable) -> None:
        self.revocable: AtomicRevocable = revocable
        """Takes the pages back. All storage calls of one call of the page store share it."""
        self._pages: Sequence[Page] | None = pages

    def pages(self) -> Sequence[Page]:
        """Return the pages. Keep none of them while the storage may wait.

        Raises:
            RevokedError: The loan has ended.
        """
        pages = self._pages
        if pages is None:
            raise RevokedError
        return pages

    def drop(self) -> None:
        """Keep the pages no longer, so that their owner can unmap them while the storage hangs."""
        self._pages = None


class Loans:
    """The memory of the storage calls of one lane. Thread-safe."""

    def __init__(self, storage: HiCacheStorage, settings: PageStoreSettings) -> None:
        claims = storage.capabilities
        trusted = settings.lend_memory == "always" and claims.scatter_gather
        self.waits: bool = trusted and not claims.revocable
        """True if a late storage call keeps the caller's pages, so that its caller waits for it."""
        self.memory: PageMemory = PageMemory(storage, settings.private_nbytes)
        self.lends: bool = claims.revocable or trusted
        """True if the storage accesses the caller's pages themselves."""
        self._keeps_given = claims.keeps_given
        if claims.keeps_given:
            new_memory(0)  # the first one imports a module, which takes longer than a call
        self._hashed = settings.checksum == "xxh3"
        self._frame_nbytes = frame_nbytes(claims.alignment)
        self.max_call_nbytes: int = (
            min(_MAX_PRIVATE_NBYTES, settings.private_nbytes // _PRIVATE_CALLS)
            if not self.lends
            else _MAX_LENT_NBYTES
        )
        """The most bytes of one storage call."""

    @contextmanager
    def to_read(
        self, space: KeySpace, count: int, loan: Loan, deadline: Deadline
    ) -> Generator[Sequence[FramedPage]]:
        """Lend memory for a read of `count` pages. Take them with `take_read` after their check."""
        with self._frames(space, count, loan, deadline, private=not self.lends) as framed:
            blank = bytes(self._frame_nbytes)
            for page in framed:  # or a header that an earlier read has left would prove the page
                page.header[:] = blank
            yield framed

    def take_read(self, read: Sequence[FramedPage], places: Sequence[int], loan: Loan) -> None:
        """Copy pages that were read into private memory to the caller's, which are at `places`.

        Raises:
            RevokedError: The loan has ended.
        """
        if not self.lends and places:
            targets = loan.pages()
            _copy(
                [targets[place] for place in places],
                [read[place].payload for place in places],
                loan.revocable,
            )

    @contextmanager
    def to_write(
        self, space: KeySpace, count: int, loan: Loan, deadline: Deadline
    ) -> Generator[Sequence[FramedPage]]:
        """Lend `count` pages for a write, or copies of them. Copies are hashed on the way.

        Raises:
            RevokedError: The loan has ended.
        """
        if self._keeps_given:
            framed = [self._given(space.page_nbytes) for _ in range(count)]
            self._fill(framed, loan)
            yield framed
            return
        with self._frames(space, count, loan, deadline, private=not self.lends) as framed:
            if not self.lends:
                self._fill(framed, loan)
            yield framed

    def _given(self, page_nbytes: int) -> FramedPage:
        """Return a page in new memory, which the storage may keep."""
        memory = new_memory(self._frame_nbytes + page_nbytes)
        framed = FramedPage.of_memory(memory, self._frame_nbytes, page_nbytes)
        framed.stored.given = True
        return framed

    def _fill(self, framed: Sequence[FramedPage], loan: Loan) -> None:
        """Copy the caller's pages, and hash them on the way unless their digests are known."""
        pages = loan.pages()
        digests: Sequence[int | None] = [page.digest for page in pages]
        unhashed = self._hashed and None in digests
        copied = _copy([one.payload for one in framed], pages, loan.revocable, hashed=unhashed)
        for one, digest in zip(framed, copied if unhashed else digests, strict=True):
            one.payload.digest = digest

    @contextmanager
    def _frames(
        self, space: KeySpace, count: int, loan: Loan, deadline: Deadline, *, private: bool
    ) -> Generator[list[FramedPage]]:
        frame = self._frame_nbytes
        each_nbytes = stride_nbytes(space.page_nbytes, frame) if private else frame
        buffer = self.memory.take(each_nbytes * count, deadline.remaining_s())
        if buffer is None:
            raise NoMemoryError
        try:
            if deadline.passed():  # while it waited for memory
                raise RevokedError
            if private:
                yield buffer.frames(space.page_nbytes, frame, count)
            else:
                lent = None if self.waits else loan.revocable
                headers = buffer.headers(frame, count)
                yield list(map(FramedPage, headers, loan.pages(), repeat(lent)))
        finally:
            self.memory.give_back(buffer)


def _copy(
    targets: Sequence[Page],
    sources: Sequence[Page],
    lent: AtomicRevocable,
    *,
    hashed: bool = False,
) -> list[int]:
    """Copy pages while they are lent. Return their digests if they are `hashed`."""
    verdicts, digests = native.copy_revocable(
        [page.segments for page in targets],
        [page.segments for page in sources],
        [lent.state] * len(targets),
        0 if hashed else _UNHASHED,
        True,
    )
    if verdicts.count(native.HIT) < len(verdicts):
        raise RevokedError
    return digests
