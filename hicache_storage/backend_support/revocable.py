"""Let an owner take memory back while a storage call still uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage import native

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.page import Page, Revocable

_NOT_REVOCABLE = bytearray()
_CHUNK_NBYTES = 256 << 10


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


def is_revoked(page: Page) -> bool:
    """Return True if the memory of a page was revoked."""
    lent = page.revocable
    if lent is None:
        return False
    if not lent.enter():
        return True
    lent.leave()
    return False


def within_access(
    revocable: Revocable, call: Callable[[memoryview], int], memory: memoryview
) -> int | None:
    """Make a call that does not wait on a chunk of `memory`. Return None if the memory is revoked."""
    if not revocable.enter():
        return None
    try:
        return call(memory[:_CHUNK_NBYTES])
    finally:
        revocable.leave()


def states_of(pages: Iterable[Page]) -> Sequence[bytearray]:
    """Return the data plane's argument `states` for `pages`."""
    revocables = [page.revocable for page in pages]
    if revocables.count(None) == len(revocables):
        return ()
    return [_NOT_REVOCABLE if one is None else one.state for one in revocables]
