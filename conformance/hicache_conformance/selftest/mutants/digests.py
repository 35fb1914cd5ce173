"""Wrong stores: the digests that they hand over; KV-206."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.evicting import EvictingStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


@caught_by("KV-206:a_digest_is_that_of_the_bytes")
class DigestOfTheWholePage(EvictingStore):
    """The digest covers the bytes that it should leave out."""

    def _digest(self, data: bytes, skip: int) -> int:
        return super()._digest(data, 0 * skip)


@caught_by("KV-206:a_digest_is_that_of_the_bytes")
class DigestOfTheFirstPage(EvictingStore):
    """Every page of a batch gets the digest of the first one."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        verdicts = super().batch_get(space, hashes, pages)
        for page in pages:
            page.digest = pages[0].digest
        return verdicts
