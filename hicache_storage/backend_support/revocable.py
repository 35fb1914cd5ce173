"""Let an owner take memory back while a storage call still uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage import native

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicache_storage.page import Page

_NOT_REVOCABLE = bytearray()


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


def states_of(pages: Iterable[Page]) -> Sequence[bytearray]:
    """Return the data plane's argument `states` for `pages`."""
    revocables = [page.revocable for page in pages]
    if revocables.count(None) == len(revocables):
        return ()
    return [_NOT_REVOCABLE if one is None else one.state for one in revocables]
