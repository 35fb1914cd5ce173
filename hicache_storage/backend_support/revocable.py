"""Let an owner take memory back while a storage call still uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hicache_storage import native
from hicache_storage.native.reference.revocables import CHUNK_NBYTES, chunks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.page import Page, Revocable

_NOT_REVOCABLE = bytearray()


class RevokedError(Exception):
    """The memory of a page was revoked."""


class Lent(Protocol):
    """A page, or anything else whose memory may be revocable."""

    @property
    def revocable(self) -> Revocable | None: ...


class AtomicRevocable:
    """A `hicache_storage.page.Revocable` whose accesses the C data plane counts. Thread-safe."""

    __slots__ = ("state",)

    state: bytearray

    def __init__(self) -> None:
        self.state = bytearray(8)

    def enter(self) -> bool:
        """Begin an access and return True. Return False if the memory is revoked."""
        return native.begin_access(self.state)

    def leave(self) -> None:
        """End an access that `enter` began."""
        native.end_access(self.state)

    def revoke(self) -> None:
        """Refuse accesses from now on. Return when no access is in progress any more. Idempotent."""
        native.revoke_access(self.state)


def is_revoked(lent: Lent) -> bool:
    """Return True if the memory of a page was revoked."""
    revocable = lent.revocable
    if revocable is None:
        return False
    if not revocable.enter():
        return True
    revocable.leave()
    return False


def within_access(
    revocable: Revocable, call: Callable[[memoryview], int], memory: memoryview
) -> int:
    """Make a call that does not wait on a chunk of `memory`, and return its result.

    Raises:
        RevokedError: The memory was revoked.
    """
    if not revocable.enter():
        raise RevokedError
    try:
        return call(memory[:CHUNK_NBYTES])
    finally:
        revocable.leave()


def for_each_piece(page: Page, call: Callable[[memoryview], object]) -> None:
    """Make a call that does not wait on each piece of a page, in order, within accesses.

    Raises:
        RevokedError: The memory was revoked before the last piece.
    """
    if page.revocable is None:
        for segment in page.segments:
            call(segment)
        return
    is_small = page.nbytes <= CHUNK_NBYTES
    for chunk in (page.segments,) if is_small else chunks_of(page.segments):
        if not page.revocable.enter():
            raise RevokedError
        try:
            for piece in chunk:
                call(piece)
        finally:
            page.revocable.leave()


def states_of(pages: Iterable[Lent]) -> Sequence[bytearray]:
    """Return the data plane's argument `states` for `pages`."""
    revocables = [page.revocable for page in pages]
    if revocables.count(None) == len(revocables):
        return ()
    return [_NOT_REVOCABLE if one is None else one.state for one in revocables]
