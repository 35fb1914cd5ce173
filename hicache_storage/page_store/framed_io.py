"""Pages with their frames, to and from a storage: written, read and proved, one call at a time."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hicache_storage.errors import CorruptPage
from hicache_storage.page import Page
from hicache_storage.page_store.call_executor import strict
from hicache_storage.page_store.frame import Framing
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store.frame import FramedPage
    from hicache_storage.storage import HiCacheStorage

logger = logging.getLogger("hicache_storage.page_store")


class FramedIO:
    """The calls of a storage that move pages. Raises whatever the storage raises. Thread-safe."""

    def __init__(self, storage: HiCacheStorage, *, checksum: bool) -> None:
        self._storage = storage
        self._checksum = checksum

    def load(
        self, framed: KeySpace, hashes: Sequence[str], pages: Sequence[FramedPage]
    ) -> list[Verdict]:
        """Read pages, and prove each that the storage says it has read."""
        stored = [page.stored for page in pages]
        landing = self._landing(framed, stored)
        found = strict(self._storage.batch_get(framed, hashes, landing), len(hashes))
        framing = Framing(framed, checksum=self._checksum)
        verdicts: list[Verdict] = []
        for hit, page_hash, page, whole, landed in zip(
            found, hashes, pages, stored, landing, strict=True
        ):
            if hit and landed is not whole:
                whole.copy_from(landed.segments[0])
            verdicts.append(_proved(framing, page_hash, page) if hit else Verdict.MISS)
        return verdicts

    def save(
        self, framed: KeySpace, hashes: Sequence[str], pages: Sequence[FramedPage]
    ) -> list[Verdict]:
        """Write the frames of pages, and store them."""
        framing = Framing(framed, checksum=self._checksum)
        for page_hash, page in zip(hashes, pages, strict=True):
            framing.write(page, page_hash)
        stored = [page.stored for page in pages]
        landing = self._landing(framed, stored)
        for whole, bounced in zip(stored, landing, strict=True):
            if bounced is not whole:
                _gather(whole, bounced.segments[0])
        taken = strict(self._storage.batch_set(framed, hashes, landing), len(hashes))
        return [Verdict.OK if ok else Verdict.REFUSED for ok in taken]

    def delete(self, framed: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Remove pages; which of them are gone for certain."""
        return strict(self._storage.batch_delete(framed, hashes), len(hashes))

    def _landing(self, framed: KeySpace, stored: list[Page]) -> list[Page]:
        """The pages as the storage wants them: their own segments, or one bounce buffer each."""
        if self._storage.capabilities.scatter_gather:
            return stored
        nbytes = framed.stored_nbytes
        bounce = memoryview(bytearray(nbytes * len(stored)))
        return [Page(bounce[n * nbytes : (n + 1) * nbytes]) for n in range(len(stored))]


def _proved(framing: Framing, page_hash: str, page: FramedPage) -> Verdict:
    try:
        framing.check(page, page_hash)
    except CorruptPage as error:
        logger.warning("a stored page is wrong and will be deleted: %s", error)
        return Verdict(error.reason)
    return Verdict.OK


def _gather(source: Page, target: memoryview) -> None:
    start = 0
    for segment in source.segments:
        target[start : start + segment.nbytes] = segment
        start += segment.nbytes
