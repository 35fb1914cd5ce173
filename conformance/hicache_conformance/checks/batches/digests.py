"""KV-206: the digests that a store returns for the pages that it read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotDeclared
from hicache_conformance.scenarios.setup import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_PAGES = 3
_SKIPS = (0, 1, 256)


@check("KV-206")
def a_digest_is_that_of_the_bytes(case: Case) -> None:
    """Each digest is the xxh3-64 of the page's bytes after the first `digest_skip`, in any segments."""
    store, space = open_store(case)
    hashes = list(case.stored(store, space, min(_PAGES, store.most_pages(space))))
    digests = _right_digests(store, space, hashes)
    if len(hashes) == _PAGES:  # behind a miss, places among the hits are not those of the batch
        digests += _right_digests(store, space, [*case.hashes(1), *hashes[1:]])
    case.evidence["digests"] = str(digests)
    if not digests:
        raise NotDeclared("the store returns no digests")


def _right_digests(store: Probe, space: KeySpace, hashes: Sequence[str]) -> int:
    """Read pages with several skips. Return how many digests came. Raise if one is wrong."""
    digests = 0
    for skip in _SKIPS:
        if skip >= space.stored_nbytes:
            continue
        for segments in (1, 3):
            memory = store.memory(space, len(hashes), segments)
            for page in memory.pages:
                page.digest_skip = skip
            hits = store.batch_get(space, hashes, memory.pages)
            for page_hash, hit, page in zip(hashes, hits, memory.pages, strict=True):
                if not hit or page.digest is None:
                    continue
                digests += 1
                expected = xxhash.xxh3_64_intdigest(page.tobytes()[skip:])
                if page.digest != expected:
                    raise store.violation(
                        "the digest of a page is not that of its bytes",
                        expected=f"{expected:016x}, xxh3-64 of the bytes from {skip} on, or None",
                        got=f"{page.digest:016x} for {page_hash[:8]}",
                    )
    return digests
