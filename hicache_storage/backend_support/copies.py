"""Copy pages, and compute their digests on the way."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from hicache_storage import native
from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_storage.page import Revocable

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


def copy_revocable(targets: Sequence[Page], sources: Sequence[Page]) -> list[bool]:
    """Copy pages of which either side may be revocable. False: the page was revoked meanwhile.

    A source's digest becomes that of its target, so nobody has to hash the copy.
    """
    copied = [True] * len(targets)
    plain: list[int] = []
    for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
        revocable = target.revocable or source.revocable
        if revocable is None:
            plain.append(index)
        else:
            copied[index] = _copy_chunks(target, source, revocable)
    native.copy_pages(
        [targets[index].segments for index in plain],
        [sources[index].segments for index in plain],
        -1,
    )
    for target, source in zip(targets, sources, strict=True):
        target.digest = source.digest if source.digest_skip == target.digest_skip else None
    return copied


def _copy_chunks(target: Page, source: Page, revocable: Revocable) -> bool:
    """Copy a page in chunks. Each chunk is an access of its own."""
    for to, chunk in _chunks(target, source):
        if not revocable.enter():
            return False
        try:
            to[:] = chunk
        finally:
            revocable.leave()
    return True


def _chunks(target: Page, source: Page) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield pairs of views of equal size, at most a chunk each."""
    if target.nbytes != source.nbytes:
        raise ValueError(f"a page of {target.nbytes} bytes cannot take {source.nbytes} bytes")
    rests = iter(target.segments)
    rest = memoryview(b"")
    for segment in source.segments:
        start = 0
        while start < segment.nbytes:
            if not rest.nbytes:
                rest = next(rests)
            nbytes = min(rest.nbytes, segment.nbytes - start, _CHUNK_NBYTES)
            yield rest[:nbytes], segment[start : start + nbytes]
            rest, start = rest[nbytes:], start + nbytes


def private_copy(page: Page) -> Page | None:
    """Copy a revocable page into new, aligned memory. Return None if the page is revoked.

    A page that is not revocable is returned unchanged, without a copy.
    """
    if page.revocable is None or not page.nbytes:
        return page
    # not closed, because the copy borrows it
    copy = Page.of_views((memoryview(mmap.mmap(-1, page.nbytes)),), page.nbytes)
    return copy if _copy_chunks(copy, page, page.revocable) else None
