"""What the pages of a replay hold: bytes that only (key space, page hash) decide.

A fixed pseudo-random pattern, turned and XORed by 64 bits of both: no part of a page looks like a part
of another, so one that is swapped, shifted, torn, stale or zero-filled shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

_TURNS = 4099
_PATTERN_SEED = 0x68696361636865


class PageContent:
    """The content of one key space's pages. Not thread-safe: it has one page of scratch memory."""

    def __init__(self, space: KeySpace) -> None:
        self._id = space.id
        words = -(-space.page_nbytes // 8)
        generator = np.random.Generator(np.random.PCG64(_PATTERN_SEED))
        self._pattern = generator.integers(0, 2**64, size=words + _TURNS, dtype=np.uint64)
        self._words = np.empty(words, dtype=np.uint64)
        self._scratch = self._words.view(np.uint8)[: space.page_nbytes]

    def write(self, page_hash: str, page: Page) -> None:
        """Fill every byte of `page`."""
        for segment, expected in self._parts(page_hash, page):
            segment[:] = expected

    def matches(self, page_hash: str, page: Page) -> bool:
        """Whether every byte of `page` is as `write` makes it."""
        return all(
            np.array_equal(_widest(segment), _widest(expected))
            for segment, expected in self._parts(page_hash, page)
        )

    def _parts(
        self, page_hash: str, page: Page
    ) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """Each segment of `page`, and what it must hold."""
        if page.nbytes != len(self._scratch):
            raise ValueError(f"a page of {len(self._scratch)} bytes is meant, not {page.nbytes}")
        seed = xxhash.xxh3_64_intdigest(f"{self._id}/{page_hash}".encode())
        turned = self._pattern[seed % _TURNS :][: len(self._words)]
        np.bitwise_xor(turned, np.uint64(seed), out=self._words)
        start = 0
        for segment in page.segments:
            end = start + segment.nbytes
            yield np.frombuffer(segment, dtype=np.uint8), self._scratch[start:end]
            start = end


def _widest(octets: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """The same bytes in as few items as there can be: comparing them is quicker."""
    return octets.view(np.uint64) if octets.nbytes % 8 == 0 else octets
