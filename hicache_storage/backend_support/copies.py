"""Copies of pages, and their digests on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage import native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.page import Page


def copy_pages(targets: Sequence[Page], sources: Sequence[Page]) -> None:
    """Copy pages without the interpreter lock. Targets that want a digest get one, all or none of them.

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
