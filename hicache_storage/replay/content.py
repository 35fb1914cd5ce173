"""Make the content of a replay's pages. The key space and the page hash alone determine the bytes.

The content is a fixed pseudo-random pattern, rotated and XORed by a 64-bit hash of both. No part of a
page looks like a part of another page, so a page that is swapped, shifted, torn, stale or filled
with zeros is detected.
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

_ROTATIONS = 4099
_PATTERN_SEED = 0x68696361636865


class PageContent:
    """The content of one key space's pages. Not thread-safe: it has one page of scratch memory."""

    def __init__(self, space: KeySpace) -> None:
        self._id = space.id
        words = -(-space.page_nbytes // 8)
        generator = np.random.Generator(np.random.PCG64(_PATTERN_SEED))
        self._pattern = generator.integers(0, 2**64, size=words + _ROTATIONS, dtype=np.uint64)
        self._words = np.empty(words, dtype=np.uint64)
        self._scratch = self._words.view(np.uint8)[: space.page_nbytes]

    def write(self, page_hash: str, page: Page) -> None:
        """Fill every byte of `page`."""
        for segment, expected in self._segments(page_hash, page):
            segment[:] = expected

    def matches(self, page_hash: str, page: Page) -> bool:
        """Return whether `page` has exactly the bytes that `write` would fill in."""
        return all(
            np.array_equal(_widest(segment), _widest(expected))
            for segment, expected in self._segments(page_hash, page)
        )

    def _segments(
        self, page_hash: str, page: Page
    ) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """Yield each segment of `page` with the content that it should have."""
        if page.nbytes != len(self._scratch):
            raise ValueError(f"the page must have {len(self._scratch)} bytes, not {page.nbytes}")
        seed = xxhash.xxh3_64_intdigest(f"{self._id}/{page_hash}".encode())
        rotated = self._pattern[seed % _ROTATIONS :][: len(self._words)]
        np.bitwise_xor(rotated, np.uint64(seed), out=self._words)
        start = 0
        for segment in page.segments:
            end = start + segment.nbytes
            yield np.frombuffer(segment, dtype=np.uint8), self._scratch[start:end]
            start = end


def _widest(octets: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Return a view of the bytes as 64-bit items if possible, because these compare faster."""
    return octets.view(np.uint64) if octets.nbytes % 8 == 0 else octets
