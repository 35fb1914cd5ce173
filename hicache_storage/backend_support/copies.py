"""Copy pages, and compute their digests on the way."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from hicache_storage import native
from hicache_storage.backend_support.revocable import states_of
from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Sequence


def new_memory(nbytes: int) -> memoryview:
    """Return memory for a copy. Its bytes are not set, because the copy sets them."""
    import numpy as np  # noqa: PLC0415 - many processes copy no page

    return np.empty(nbytes, np.uint8).data


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

    Raises:
        ValueError: A page and its target have different sizes. Nothing was copied.
    """
    given = [
        source if target.revocable is None else target
        for target, source in zip(targets, sources, strict=True)
    ]
    verdicts, _ = native.copy_revocable(
        [page.segments for page in targets], [page.segments for page in sources], states_of(given)
    )
    for target, source in zip(targets, sources, strict=True):
        target.digest = source.digest if source.digest_skip == target.digest_skip else None
    return [verdict == native.HIT for verdict in verdicts]


def private_copy(page: Page) -> Page | None:
    """Copy a revocable page into new, aligned memory. Return None if the page is revoked.

    A page that is not revocable is returned unchanged, without a copy.
    """
    if page.revocable is None or not page.nbytes:
        return page
    # not closed, because the copy borrows it
    copy = Page.of_views((memoryview(mmap.mmap(-1, page.nbytes)),), page.nbytes)
    return copy if copy_revocable([copy], [page]) == [True] else None
