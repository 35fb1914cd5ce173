"""Remember page hashes in a fixed number of bytes, with two Bloom filters of different ages."""

from __future__ import annotations

import struct
from itertools import compress
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import numpy.typing as npt

BITS_PER_PAGE = 10
"""Bits of one filter for each remembered page. Both filters take 2.5 MB for a million pages."""
HASHES = 5
MAX_ERROR = 0.019
"""The highest chance that a new page counts as seen: (1 - e^(-5/10))^5 for each full filter."""
FILTERS = 2

_HEADER = struct.Struct("<8sIIQQQ24x")  # magic, version, hashes, bytes, generation, pages
_MAGIC = b"HCSKETCH"
_VERSION = 1


def state_of(dump: bytes) -> tuple[int, int]:
    """Return the generation and number of pages of a dumped filter, or (-1, -1) for other bytes."""
    if len(dump) < _HEADER.size:
        return -1, -1
    magic, *_, generation, pages = _HEADER.unpack_from(dump)
    return (generation, pages) if magic == _MAGIC else (-1, -1)


class PageSketch:
    """A memory of the last pages that were offered: at least `pages` of them, and at most twice as many.

    A page that was seen always counts as seen until `pages` other pages were offered. A page that was
    not seen counts as seen with a chance of at most `MAX_ERROR`. When the younger filter holds `pages`
    pages, it becomes the older one, and an empty filter takes its place. Not thread-safe.
    """

    def __init__(self, pages: int) -> None:
        import numpy as np  # noqa: PLC0415 - only `second_use` needs it

        self._pages = pages
        self._nbytes = -(-pages * BITS_PER_PAGE // 64) * 8
        self._filters = [np.zeros(self._nbytes, np.uint8) for _ in range(FILTERS)]
        self._counts = [0] * FILTERS
        self._generation = 1
        self._restored = [(0, 0)] * FILTERS
        """For each filter, the generation of the dumps that were added last, and their page count."""

    @property
    def nbytes(self) -> int:
        """The size of both filters, in bytes."""
        return FILTERS * self._nbytes

    @property
    def stored_nbytes(self) -> int:
        """The size of one filter as `dump` returns it, in bytes."""
        return _HEADER.size + self._nbytes

    @property
    def young(self) -> int:
        """The number, 0 or 1, of the filter that takes new pages."""
        return self._generation % FILTERS

    def add(self, hashes: Sequence[str], group: str = "") -> list[bool]:
        """Remember pages. Return True for each page that was seen before in the same `group`."""
        seen: list[bool] = []
        while len(seen) < len(hashes):
            if self._counts[self.young] >= self._pages:
                self._age()
            room = self._pages - self._counts[self.young]
            seen += self._add(hashes[len(seen) : len(seen) + room], group)
        return seen

    def _add(self, hashes: Sequence[str], group: str) -> list[bool]:
        import numpy as np  # noqa: PLC0415

        places, masks = self._places(hashes, group)
        is_new = ~self._has(self.young, places, masks)
        seen: list[bool] = (~is_new | self._has(1 - self.young, places, masks)).tolist()
        np.bitwise_or.at(self._filters[self.young], places[is_new].ravel(), masks[is_new].ravel())
        self._counts[self.young] += len(set(compress(hashes, is_new.tolist())))
        return seen

    def state(self, number: int) -> tuple[int, int]:
        """Return the generation and number of pages of a filter. They differ after every change."""
        return self._generation - (number != self.young), self._counts[number]

    def dump(self, number: int) -> bytes:
        """Return a filter as bytes for `restore`."""
        header = _HEADER.pack(_MAGIC, _VERSION, HASHES, self._nbytes, *self.state(number))
        return header + self._filters[number].tobytes()

    def restore(self, dumps: Iterable[bytes]) -> int:
        """Add the pages of dumped filters, in any order. Return how many dumps were usable.

        A dump is not usable if its size or format differs, or if it is older than both filters are by
        then. There may be several dumps of one filter. Adding a dump again changes nothing.
        """
        found = [dump for dump in map(self._parse, dumps) if dump is not None]
        generation = max([self._generation, *(each[0] for each in found)])
        if (generation - self._generation) % FILTERS:
            self._filters.reverse()
            self._counts.reverse()
            self._restored.reverse()
        self._generation = generation
        fitting = [each for each in found if generation - each[0] < FILTERS]
        for number in range(FILTERS):
            dumped = [each for each in fitting if each[0] % FILTERS == number]
            for _, _, bits in dumped:
                self._filters[number] |= bits
            if dumped:
                taken, counted = self._restored[number]
                counted = counted if taken == dumped[0][0] else 0
                pages = max(counted, *(count for _, count, _ in dumped))
                self._counts[number] += pages - counted
                self._restored[number] = dumped[0][0], pages
        return len(fitting)

    def _parse(self, dump: bytes) -> tuple[int, int, npt.NDArray[np.uint8]] | None:
        """Return the generation, number of pages and bits of a dump, or None if it is not usable."""
        import numpy as np  # noqa: PLC0415

        if len(dump) != self.stored_nbytes:
            return None
        *form, generation, count = _HEADER.unpack_from(dump)
        if form != [_MAGIC, _VERSION, HASHES, self._nbytes]:
            return None
        return generation, count, np.frombuffer(dump, np.uint8, offset=_HEADER.size)

    def _age(self) -> None:
        self._generation += 1
        self._filters[self.young][:] = 0
        self._counts[self.young] = 0
        self._restored[self.young] = 0, 0

    def _has(self, number: int, places: npt.NDArray[Any], masks: npt.NDArray[Any]) -> Any:
        return ((self._filters[number][places] & masks) != 0).all(axis=1)

    def _places(
        self, hashes: Sequence[str], group: str
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint8]]:
        """Return, for each page and hash function, the index of a byte and the mask of a bit in it."""
        import numpy as np  # noqa: PLC0415

        digest = xxhash.xxh3_128_digest
        digests = b"".join(digest(f"{group}/{page_hash}".encode()) for page_hash in hashes)
        halves = np.frombuffer(digests, "<u8").reshape(-1, 2)
        steps = np.arange(HASHES, dtype=np.uint64)
        bits = (halves[:, :1] + (halves[:, 1:] | np.uint64(1)) * steps) % np.uint64(
            8 * self._nbytes
        )
        masks = np.left_shift(np.uint8(1), (bits & np.uint64(7)).astype(np.uint8))
        return bits >> np.uint64(3), masks
