"""Host memory for the pages of a test, with guard bytes around every segment.

The guards show a write outside the pages, which no store may do (KV-004).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.page import Page, address_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_GUARD_NBYTES = 64
_GUARD = b"\xe7"
_UNTOUCHED = b"\xa5"
_NEXT_USER = b"\x3c"


class PageMemory:
    """Equal pages in one allocation, each in `segments` pieces that do not touch.

    Segments start at multiples of `alignment`. The pieces of a page have different lengths if the
    page is long enough, or the given `lengths`.
    """

    def __init__(
        self,
        count: int,
        nbytes: int,
        *,
        segments: int = 1,
        alignment: int = 1,
        lengths: Sequence[int] = (),
    ) -> None:
        lengths = lengths or _lengths(nbytes, segments, alignment)
        step = max(alignment, 1)
        strides = [_round_up(length + _GUARD_NBYTES, step) for length in lengths]
        total = _round_up(_GUARD_NBYTES, step) + count * sum(strides) + step
        self._memory = memoryview(bytearray(_GUARD * total))
        view = self._memory
        start = _round_up(address_of(view) + _GUARD_NBYTES, step) - address_of(view)
        self._guards: list[tuple[int, int]] = [(0, start)]
        self.pages: list[Page] = []
        for _ in range(count):
            parts: list[memoryview] = []
            for length, stride in zip(lengths, strides, strict=True):
                parts.append(view[start : start + length])
                view[start : start + length] = _UNTOUCHED * length
                self._guards.append((start + length, start + stride))
                start += stride
            self.pages.append(Page(*parts))

    def filled_with(self, contents: Sequence[bytes]) -> PageMemory:
        """Fill the pages and return this memory."""
        for page, data in zip(self.pages, contents, strict=True):
            page.copy_from(data)
        return self

    def overrun(self) -> str:
        """Describe what a store wrote outside the pages, or return ""."""
        for start, end in self._guards:
            touched = end - start - self._memory[start:end].tobytes().count(_GUARD)
            if touched:
                return f"{touched} bytes next to a page's segment were overwritten"
        return ""

    def touched(self) -> bool:
        """Return whether anything was written into the pages since they were made or blanked."""
        return not all(_holds_only(page, _UNTOUCHED) for page in self.pages)

    def blank(self) -> None:
        """Fill the pages with the byte of an untouched page."""
        for page in self.pages:
            page.copy_from(_UNTOUCHED * page.nbytes)


def overwrite(pages: Sequence[Page]) -> None:
    """Overwrite the pages with bytes that stand for the data of their next user."""
    for page in pages:
        page.copy_from(_NEXT_USER * page.nbytes)


def is_overwritten(page: Page) -> bool:
    """Return whether a page holds only what `overwrite` wrote."""
    return _holds_only(page, _NEXT_USER)


def _holds_only(page: Page, byte: bytes) -> bool:
    return page.tobytes() == byte * page.nbytes


def _lengths(nbytes: int, segments: int, alignment: int) -> list[int]:
    """Cut `nbytes` into up to `segments` uneven pieces: all but the last in multiples of `alignment`."""
    if segments == 1 or nbytes < 2 * alignment:
        return [nbytes]
    units, rest = divmod(nbytes, alignment)
    count = min(segments, units)
    base, spare = divmod(units, count)
    sizes = [base] * count
    sizes[-1] += spare
    for left in range(0, count - 1, 2):
        shift = min(sizes[left] - 1, left % 3)
        sizes[left] -= shift
        sizes[left + 1] += shift
    return [size * alignment for size in sizes[:-1]] + [sizes[-1] * alignment + rest]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
