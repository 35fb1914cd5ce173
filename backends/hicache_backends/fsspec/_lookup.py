"""Whether to ask for each page of a batch or to list their directory: what has been quicker."""

from __future__ import annotations

_LEAST_PAGES = 16
"""Fewer are asked for one by one."""
_WEIGHT = 0.2
_FADE = 0.9


class Lookup:
    """Learns as it goes what a page and what a listing take. Lost updates of threads do no harm."""

    def __init__(self) -> None:
        self._page_s = 0.0
        self._listing_s: dict[str, float] = {}

    def prefers_listing(self, space_id: str, pages: int) -> bool:
        """Whether one listing of the key space is expected to be quicker than so many pages.

        It is tried where nothing is known yet. What is remembered of a slow one fades: the directory may
        have become smaller.
        """
        if pages < _LEAST_PAGES:
            return False
        listing_s = self._listing_s.get(space_id, 0.0)
        self._listing_s[space_id] = listing_s * _FADE
        return listing_s <= pages * self._page_s

    def note_pages(self, pages: int, elapsed_s: float) -> None:
        """So many pages were asked for, several at once; of few there is nothing to be learnt."""
        if pages >= _LEAST_PAGES:
            sample = elapsed_s / pages
            self._page_s += (sample - self._page_s) * (_WEIGHT if self._page_s else 1.0)

    def note_listing(self, space_id: str, elapsed_s: float) -> None:
        """The key space was listed, or too large to be listed in time."""
        self._listing_s[space_id] = elapsed_s
