"""Shows a few warnings of each kind from a store, because thousands would hide the verdict."""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Generator

_MOST = 5
_PLACES: set[tuple[type[Warning], str, int]] = set()
_SHOWN: Counter[type[Warning]] = Counter()


@contextmanager
def few_warnings() -> Generator[None, None, None]:
    """Show one warning from each place in the code, and at most five per kind, in this process."""
    before = warnings.showwarning

    def show(  # noqa: PLR0917 - the signature of `warnings.showwarning`
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        place = (category, filename, lineno)
        if place not in _PLACES and _SHOWN[category] < _MOST:
            _PLACES.add(place)
            _SHOWN[category] += 1
            before(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before
