"""Storage calls that move framed pages: each writes or checks the frames of its pages."""

from __future__ import annotations

import logging
from itertools import compress
from typing import TYPE_CHECKING

from hicache_storage.backend_support.copies import copy_pages
from hicache_storage.page import Page
from hicache_storage.page_store.call_executor import checked_answers
from hicache_storage.page_store.frame import Framing, completed_checksums
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
        skip = len(pages[0].header) if self._checksum and pages else None
        for target in bounced:
            target.digest, target.digest_skip = None, skip
        hits = checked_answers(self._storage.batch_get(framed, hashes, bounced), len(hashes))
        if bounced is not stored:
            copy_pages(list(compress(stored, hits)), list(compress(bounced, hits)))
        found = [index for index, hit in enumerate(hits) if hit]
        checksums: Sequence[int | None] = [bounced[index].digest for index in found]
        if self._checksum and None in checksums:
            checksums = completed_checksums([pages[index].payload for index in found], checksums)
            if None in checksums:  # revoked since the storage read it, and nobody waits for it
                known = [checksum is not None for checksum in checksums]
                found, checksums = list(compress(found, known)), list(compress(checksums, known))
        verdicts = [Verdict.MISS] * len(hits)
        for index in found:
            verdicts[index] = Verdict.OK
        errors = Framing(framed, checksum=self._checksum).errors(
            [pages[index] for index in found], [hashes[index] for index in found], checksums
        )
        for index, error in errors.items():
            logger.warning("a stored page is wrong and will be deleted: %s", error)
            verdicts[found[index]] = Verdict(error.reason)
        return verdicts

    def save(
        self, framed: KeySpace, hashes: Sequence[str], pages: Sequence[FramedPage]
    ) -> list[Verdict]:
        """Write the frames of pages, and store them."""
        Framing(framed, checksum=self._checksum).write(pages, hashes)
        stored = [page.stored for page in pages]
        bounced = self._bounce_pages(framed, stored)
        if bounced is not stored:
            copy_pages(bounced, stored)
        accepted = checked_answers(self._storage.batch_set(framed, hashes, bounced), len(hashes))
        return [Verdict.OK if ok else Verdict.REFUSED for ok in accepted]

    def delete(self, framed: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Remove pages. Return for each page True if it is certainly gone."""
        return checked_answers(self._storage.batch_delete(framed, hashes), len(hashes))

    def _bounce_pages(self, framed: KeySpace, stored: list[Page]) -> list[Page]:
        """Return pages of one segment each. Return `stored` for a storage that scatters and gathers."""
        if self._storage.capabilities.scatter_gather:
            return stored
        nbytes = framed.stored_nbytes
        bounce = memoryview(bytearray(nbytes * len(stored)))
        return [Page(bounce[n * nbytes : (n + 1) * nbytes]) for n in range(len(stored))]
