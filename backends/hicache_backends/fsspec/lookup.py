"""Look pages up: ask for each page, or list their directory, whichever should take less time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_backends.fsspec.executors import Result
from hicache_backends.fsspec.layout import file_nbytes, page_name
from hicache_backends.fsspec.results import is_outage
from hicache_storage.backend_support.manifest import PAGE_HASH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.fsspec.files import Entry
    from hicache_backends.fsspec.mount import Mount
    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.keys import KeySpace

_MIN_LISTING_S = 0.1
"""If asking for each page takes no longer than this, do not risk a listing, which may take long."""
_MIN_PAGES = 16
"""A lookup of fewer pages is not measured, because its time is not proportional to its pages."""
_WEIGHT = 0.2
_DECAY = 0.9
_MOST_SPACES = 4096
"""How many key spaces are remembered.

Clients decide how many there are, by their tenants and salts.
"""
_FAILED_FACTOR = 8.0
"""A listing that did not finish is assumed to take this many times the time that it was given."""


class Lookup:
    """The choice between asking for each page and listing the directory, from measured times.

    Threads may overwrite each other's updates, which does no harm.
    """

    def __init__(self, first_guess_s: float) -> None:
        self._page_s = first_guess_s
        self._listing_s: dict[str, float] = {}

    def exists(
        self, mount: Mount, space: KeySpace, hashes: Sequence[str], deadline: Deadline
    ) -> list[Result[bool]]:
        """Return one result per page: True if its file has the size of a page."""
        budget_s = self.budget_s(space.id, len(hashes))
        present = self.list_pages(mount, space, budget_s, deadline) if budget_s else None
        if present is not None:
            return [Result(page_hash in present) for page_hash in hashes]
        nbytes = file_nbytes(space)

        async def has_size(page_hash: str) -> bool:
            return await mount.files.size(page_name(space.id, page_hash)) == nbytes

        began_s = time.monotonic()
        results = mount.each(has_size, hashes, deadline)
        if not all(is_outage(result.error) for result in results):
            self.note_pages(len(hashes), time.monotonic() - began_s)
        return results

    def budget_s(self, space_id: str, pages: int) -> float:
        """Return how long a listing may take and still be faster than `pages` requests. 0: do not list.

        Each call shortens the noted time of a slow listing, because the directory may be smaller by
        now.
        """
        expected_s = pages * self._page_s
        listing_s = self._listing_s.get(space_id, 0.0)
        if listing_s:
            self.note_listing(space_id, listing_s * _DECAY, done=True)
        return expected_s if max(listing_s, _MIN_LISTING_S) <= expected_s else 0.0

    def note_pages(self, pages: int, elapsed_s: float) -> None:
        """Note how long it took to ask for each page."""
        if pages >= _MIN_PAGES:
            self._page_s += (elapsed_s / pages - self._page_s) * _WEIGHT

    def note_listing(self, space_id: str, elapsed_s: float, *, done: bool) -> None:
        """Note how long a listing took. `done` is False if the listing was not finished."""
        if len(self._listing_s) >= _MOST_SPACES:
            self._listing_s.clear()
        self._listing_s[space_id] = elapsed_s * (1.0 if done else _FAILED_FACTOR)

    def list_pages(
        self, mount: Mount, space: KeySpace, budget_s: float, deadline: Deadline
    ) -> set[str] | None:
        """Return the pages of `space`, or None if the listing failed or exceeded `budget_s`."""
        began_s = time.monotonic()
        result = mount.attempt(mount.files.entries, space.id, budget_s, deadline)
        self.note_listing(space.id, time.monotonic() - began_s, done=result.error is None)
        if result.value is None:
            return None
        nbytes = file_nbytes(space)
        return {entry.name for entry in pages_among(result.value) if entry.nbytes == nbytes}


def pages_among(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries that are named like pages."""
    return [entry for entry in entries if PAGE_HASH.fullmatch(entry.name)]
