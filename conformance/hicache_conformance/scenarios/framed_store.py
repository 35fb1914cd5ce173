"""A storage behind a page store, which adds a header with a checksum to each page and checks it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from hicache_conformance.run.outcomes import NotDeclared
from hicache_conformance.tools.content.memory import PageMemory
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings
from hicache_storage.page_store.counters import pages_counter
from hicache_storage.page_store.frame import FramedPage, Framing, frame_nbytes
from hicache_storage.page_store.results import Transfer, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

PAGE_STORE = "page_store"
"""The name in `Subject.absent` for a store that is used without the frames of the page store."""
_TIMEOUT_S = 60.0
# The checks damage pages on purpose, so the terminal shows no warnings about them.
logging.getLogger("hicache_storage.page_store").addHandler(logging.NullHandler())


def framed_space(case: Case, nbytes: int) -> KeySpace:
    """Return a key space whose pages have `nbytes`, or as many as fit next to the header.

    Raises:
        NotDeclared: The store takes no page with room for a header and a few bytes.
        NotVerified: The store is used without the page store.
    """
    case.require_present(PAGE_STORE)
    claims = case.claims
    limit = claims.max_page_nbytes
    page_nbytes = nbytes if limit is None else min(nbytes, limit - frame_nbytes(claims.alignment))
    if page_nbytes < 32:
        raise NotDeclared("the store's pages are too small for the header of the page store")
    return case.space(page_nbytes)


class FramedStore:
    """One key space of a storage, behind a page store with checksums. `close` closes both."""

    def __init__(self, case: Case, probe: Probe, space: KeySpace) -> None:
        self._case = case
        self._probe = probe
        self._space = space
        self._store = PageStore(probe.storage, PageStoreSettings(timeout_s=_TIMEOUT_S))
        self._store.open_space(space)
        self.stored_space = replace(space, frame_nbytes=self._store.frame_nbytes)
        """The key space with the frame, as the storage sees it."""

    def save(self, payloads: Mapping[str, bytes]) -> dict[str, bytes]:
        """Save pages, none of which may be refused. Return the stored bytes of each."""
        pages = self._pages(len(payloads))
        for page, payload in zip(pages, payloads.values(), strict=True):
            page.copy_from(payload)
        verdicts = self._run("save", list(payloads), pages)
        if set(verdicts) != {Verdict.OK}:
            violation = self._probe.violation(
                "the page store can't save a page",
                expected="ok for every page",
                got=", ".join(verdict.value for verdict in verdicts),
            )
            raise self._case.refused(self.stored_space, violation)
        self._case.trace.stored[self.stored_space].update(payloads)
        headers = [memoryview(bytearray(self.stored_space.frame_nbytes)) for _ in pages]
        framed = list(map(FramedPage, headers, pages))
        Framing(self.stored_space, checksum=True).write(framed, list(payloads))
        return {key: page.stored.tobytes() for key, page in zip(payloads, framed, strict=True)}

    def load(self, payloads: Mapping[str, bytes]) -> dict[str, Verdict]:
        """Return the verdict on each page. Raise if an OK page does not hold its payload."""
        pages = self._pages(len(payloads))
        verdicts = dict(zip(payloads, self._run("load", list(payloads), pages), strict=True))
        for (page_hash, payload), page in zip(payloads.items(), pages, strict=True):
            data = page.tobytes()
            if verdicts[page_hash] is Verdict.OK and data != payload:
                raise self._case.wrong_bytes(self._probe, self._space, page_hash, data, [payload])
        return verdicts

    def corrupt_count(self) -> int:
        """Return how many loaded pages the page store has counted as damaged."""
        counters = self._store.stats()
        wrong = (Verdict.CORRUPT, Verdict.WRONG_KEY, Verdict.WRONG_SIZE)
        return sum(counters.get(pages_counter("load", verdict), 0) for verdict in wrong)

    def close(self) -> None:
        self._store.close()
        self._probe.close()

    def _pages(self, count: int) -> list[Page]:
        claims, framed = self._probe.storage.capabilities, self.stored_space
        memory = PageMemory(count, framed.stored_nbytes, alignment=claims.alignment)
        return [Page(page.segments[0][framed.frame_nbytes :]) for page in memory.pages]

    def _run(self, name: str, hashes: Sequence[str], pages: Sequence[Page]) -> list[Verdict]:
        trace = self._probe.trace
        call = self._store.save if name == "save" else self._store.load
        number = trace.began(f"page store.{name}", hashes)
        (verdicts,) = call([Transfer(self._space, hashes, pages)]).verdicts
        trace.ended(number, ", ".join(verdict.value for verdict in verdicts))
        return verdicts
