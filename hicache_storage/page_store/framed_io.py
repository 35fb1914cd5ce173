"""Storage calls that move framed pages: each writes or checks the frames of its pages."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hicache_storage.errors import CorruptPage
from hicache_storage.page import Page
from hicache_storage.page_store.call_executor import checked_answers
from hicache_storage.page_store.frame import Framing, payload_checksums
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store.frame import FramedPage
    from hicache_storage.storage import HiCacheStorage

logger: logging.Logger = logging.getLogger("hicache_storage.page_store")


class FramedIO:
    """One storage call for each method call. Its errors are the storage's. Thread-safe."""

    def __init__(self, storage: HiCacheStorage, *, checksum: bool) -> None:
        self._storage = storage
        self._checksum = checksum

    def load(
        self, framed: KeySpace, hashes: Sequence[str], pages: Sequence[FramedPage]
    ) -> list[Verdict]:
        """Read pages, and check the frame of each page that the storage claims to have read."""
        stored = [page.stored for page in pages]
        bounced = self._bounce_pages(framed, stored)
        if self._checksum:
            for target, page in zip(bounced, pages, strict=True):
                target.digest_skip = len(page.header)
        hits = checked_answers(self._storage.batch_get(framed, hashes, bounced), len(hashes))
        for hit, target, source in zip(hits, stored, bounced, strict=True):
            if hit and source is not target:
                target.copy_from(source.segments[0])
        checksums = self._checksums(pages, bounced, hits)
        framing = Framing(framed, checksum=self._checksum)
        return [
            _check_frame(framing, page_hash, page, checksums.get(index)) if hit else Verdict.MISS
            for index, (hit, page_hash, page) in enumerate(zip(hits, hashes, pages, strict=True))
        ]

    def save(
        self, framed: KeySpace, hashes: Sequence[str], pages: Sequence[FramedPage]
    ) -> list[Verdict]:
        """Write the frames of pages, and store them."""
        framing = Framing(framed, checksum=self._checksum)
        checksums = self._checksums(pages, [None] * len(pages), [True] * len(pages))
        for index, (page_hash, page) in enumerate(zip(hashes, pages, strict=True)):
            framing.write(page, page_hash, checksums.get(index))
        stored = [page.stored for page in pages]
        bounced = self._bounce_pages(framed, stored)
        for source, target in zip(stored, bounced, strict=True):
            if target is not source:
                source.copy_to(target.segments[0])
        accepted = checked_answers(self._storage.batch_set(framed, hashes, bounced), len(hashes))
        return [Verdict.OK if ok else Verdict.REFUSED for ok in accepted]

    def delete(self, framed: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Remove pages. Return for each page True if it is certainly gone."""
        return checked_answers(self._storage.batch_delete(framed, hashes), len(hashes))

    def _checksums(
        self, pages: Sequence[FramedPage], filled: Sequence[Page | None], wanted: Sequence[bool]
    ) -> dict[int, int]:
        """Return checksums by index. A storage that hashed a page has left the digest in `filled`."""
        if not self._checksum:
            return {}
        known = {
            index: page.digest
            for index, page in enumerate(filled)
            if wanted[index] and page is not None and page.digest is not None
        }
        unknown = [index for index, want in enumerate(wanted) if want and index not in known]
        values = payload_checksums([pages[index].payload for index in unknown])
        return {**known, **dict(zip(unknown, values, strict=True))}

    def _bounce_pages(self, framed: KeySpace, stored: list[Page]) -> list[Page]:
        """Return pages of one segment each. Return `stored` for a storage that scatters and gathers."""
        if self._storage.capabilities.scatter_gather:
            return stored
        nbytes = framed.stored_nbytes
        bounce = memoryview(bytearray(nbytes * len(stored)))
        return [Page(bounce[n * nbytes : (n + 1) * nbytes]) for n in range(len(stored))]


def _check_frame(
    framing: Framing, page_hash: str, page: FramedPage, checksum: int | None
) -> Verdict:
    try:
        framing.check(page, page_hash, checksum)
    except CorruptPage as error:
        logger.warning("a stored page is wrong and will be deleted: %s", error)
        return Verdict(error.reason)
    return Verdict.OK
