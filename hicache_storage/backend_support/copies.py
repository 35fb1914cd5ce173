"""Copy pages, and compute their digests on the way."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from hicache_storage import native
from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Sequence

_CHUNK_NBYTES = 256 << 10


def copy_pages(targets: Sequence[Page], sources: Sequence[Page]) -> None:
    """Copy pages without the interpreter lock. Also set digests if the targets ask for them.

    Either all of the targets ask for a digest, or none.

    Raises:
        ValueError: A page and its target have different sizes. Nothing was copied.
    """
    skip = targets[0].digest_skip if targets else None
    digests = native.copy_pages(
        [page.segments for page in targets],
        [page.segments for page in sources],
        -1 if skip is None else skip,
    )
    for index, page in enumerate(targets):
        page.digest = digests[index] if digests else None


def private_copy(page: Page) -> Page | None:
    """Copy a revocable page into new, aligned memory. Return None if the page is revoked.

    A page that is not revocable is returned unchanged, without a copy.
    """
    if page.revocable is None or not page.nbytes:
        return page
    memory = memoryview(mmap.mmap(-1, page.nbytes))  # not closed, because the copy borrows it
    start = 0
    for segment in page.segments:
        for offset in range(0, segment.nbytes, _CHUNK_NBYTES):
            chunk = segment[offset : offset + _CHUNK_NBYTES]
            if not page.revocable.enter():
                return None
            try:
                memory[start : start + chunk.nbytes] = chunk
            finally:
                page.revocable.leave()
            start += chunk.nbytes
    return Page.of_views((memory,), page.nbytes)
