"""Whether to ask for each page of a batch or to list their directory: what will be quicker."""

from __future__ import annotations

_WORTH_S = 0.1
"""A lookup that takes no longer is not worth a listing, which may turn out to be long."""
_LEAST_PAGES = 16
"""A few pages take as long as one, and say nothing of many."""
_WEIGHT = 0.2
_FADE = 0.9
_FAILED_FACTOR = 8.0
"""How much longer than it was given a listing is taken to be that did not end."""


class Lookup:
    """Learns what a page and what a listing take. Lost updates of threads do no harm."""

    def __init__(self, first_guess_s: float) -> None:
        self._page_s = first_guess_s
        self._listing_s: dict[str, float] = {}

    def budget_s(self, space_id: str, pages: int) -> float:
        """How long a listing may take to be quicker than so many pages; 0: do without.

        What is remembered of a slow one fades: the directory may have become smaller.
        """
        expected_s = pages * self._page_s
        listing_s = self._listing_s.get(space_id, 0.0)
        self._listing_s[space_id] = listing_s * _FADE
        return expected_s if max(listing_s, _WORTH_S) <= expected_s else 0.0

    def note_pages(self, pages: int, elapsed_s: float) -> None:
        """So many pages were asked for one by one."""
        if pages >= _LEAST_PAGES:
            self._page_s += (elapsed_s / pages - self._page_s) * _WEIGHT

    def note_listing(self, space_id: str, elapsed_s: float, *, done: bool) -> None:
        """The key space was listed, or was not in the time that was given."""
        self._listing_s[space_id] = elapsed_s * (1.0 if done else _FAILED_FACTOR)
