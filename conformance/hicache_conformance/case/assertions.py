"""The assertions about a store's answers. The store's claims decide whether a page may be missing."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from hicache_conformance.run.outcomes import NotVerified, Violation
from hicache_conformance.tools.content.content import diagnose
from hicache_storage.storage import Retention

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.case.probe import Probe, Trace
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import Capabilities


class Forgot(Violation):
    """A page is missing. The store may forget pages, but did so only in this situation."""


class Assertions(abc.ABC):
    """The assertions of a check. The capabilities of the store decide which answers are right."""

    trace: Trace

    @property
    @abc.abstractmethod
    def claims(self) -> Capabilities:
        """The claims of the store."""

    @abc.abstractmethod
    def hashes(self, count: int) -> list[str]:
        """Return `count` new page hashes."""

    @abc.abstractmethod
    def contents(
        self, space: KeySpace, hashes: Sequence[str], version: int = 0
    ) -> dict[str, bytes]:
        """Return the contents of pages in this version, by page hash."""

    @abc.abstractmethod
    def refuses(self, nbytes: int) -> bool:
        """Return True if the store refuses pages of this size, or this many pages, for no reason."""

    @abc.abstractmethod
    def forgets(self, probe: Probe) -> bool:
        """Return True if the store forgets pages for no reason."""

    @property
    def keeps(self) -> bool:
        """True if a page must be there until it is deleted."""
        return self.claims.retention is Retention.UNTIL_DELETED

    def stored(self, probe: Probe, space: KeySpace, count: int, **options: Any) -> dict[str, bytes]:
        """Set `count` new pages and return them. A refused set is a violation."""
        pages = self.contents(space, self.hashes(count))
        self.must_set(probe, space, pages, **options)
        return pages

    def must_set(
        self, probe: Probe, space: KeySpace, pages: Mapping[str, bytes], **options: Any
    ) -> None:
        """Set pages. Every verdict must be True.

        Raises:
            NotVerified: The store refuses pages of this kind for no reason.
        """
        answers = probe.set(space, pages, **options)
        refused = [page_hash for page_hash, ok in zip(pages, answers, strict=True) if not ok]
        if refused:
            violation = probe.violation(
                f"batch_set refused {len(refused)} of {len(pages)} pages of {space.stored_nbytes} bytes",
                expected="True for every page: the store has room",
                got=f"False for {refused[0][:8]}...",
                sequence=self.trace.sequence(*(h[:8] for h in refused[:2])),
            )
            raise self.refused(space, violation)

    def must_hold(
        self,
        probe: Probe,
        space: KeySpace,
        pages: Mapping[str, bytes | Sequence[bytes]],
        *,
        segments: int = 1,
    ) -> int:
        """Read every page, compare it with the contents that it may have, and return the number of hits.

        A hit must have one of the contents. A miss is a violation if the store keeps pages until
        they are deleted. If the store may forget pages, a miss is a violation (`Forgot`) only if
        the store does not forget pages outside the situation of this check.
        """
        found = probe.get(space, list(pages), segments=segments)
        hits = 0
        for (page_hash, allowed), data in zip(pages.items(), found, strict=True):
            contents = [allowed] if isinstance(allowed, bytes) else list(allowed)
            if data is None:
                self.missed(probe, space, page_hash)
            elif data not in contents:
                raise self.wrong_bytes(probe, space, page_hash, data, contents)
            else:
                hits += 1
        seen = probe.exists(space, list(pages))
        for page_hash, there in zip(pages, seen, strict=True):
            if not there:
                self.missed(probe, space, page_hash, "batch_exists")
        return hits

    def must_miss(self, probe: Probe, space: KeySpace, hashes: Sequence[str], why: str) -> None:
        """Assert that `exists` and `get` return False; `why` is the reason, as in "was deleted".

        Without hashes, make no call, because only KV-201 is about an empty batch.
        """
        if not hashes:
            return
        for page_hash, there in zip(hashes, probe.exists(space, hashes), strict=True):
            if there:
                if self.trace.was_not_deleted(space, page_hash):
                    raise self._undeleted(probe, page_hash)
                raise probe.violation(
                    f"batch_exists is True for a page that {why}",
                    expected="False",
                    got=f"True for {page_hash[:8]}",
                    sequence=self.trace.sequence(page_hash[:8]),
                )
        for page_hash, data in zip(hashes, probe.get(space, hashes), strict=True):
            if data is not None:
                raise probe.violation(
                    f"batch_get is True for a page that {why}",
                    expected="a miss",
                    got=f"{page_hash[:8]}: {self.diagnosed(space, page_hash, data, [])}",
                    sequence=self.trace.sequence(page_hash[:8]),
                )

    def _undeleted(self, probe: Probe, page_hash: str) -> Violation:
        return probe.violation(
            "batch_delete is False for a page, although nothing is wrong with the store",
            expected="True: the page is gone, or was never there. False: it may still be there",
            got=f"False for {page_hash[:8]}, which is there",
            sequence=self.trace.sequence(page_hash[:8]),
        )

    def wrong_bytes(
        self,
        probe: Probe,
        space: KeySpace,
        page_hash: str,
        data: bytes,
        allowed: Sequence[bytes],
    ) -> Violation:
        """Return the violation for a hit with bytes that the page may not have."""
        return probe.violation(
            "batch_get is True with bytes that were never set under this hash",
            expected=f"the {space.stored_nbytes} bytes that were set, or a miss",
            got=f"{page_hash[:8]}: {self.diagnosed(space, page_hash, data, allowed)}",
            sequence=self.trace.sequence(page_hash[:8]),
        )

    def diagnosed(
        self, space: KeySpace, page_hash: str, data: bytes, allowed: Sequence[bytes]
    ) -> str:
        """Return a sentence that says where wrong bytes come from."""
        return diagnose(data, space_id=space.id, page_hash=page_hash, allowed=allowed)

    def missed(
        self, probe: Probe, space: KeySpace, page_hash: str, operation: str = "batch_get"
    ) -> None:
        """Raise for a missing page whose set returned True, unless the store may forget the page."""
        if not self.keeps and self.forgets(probe):
            return
        kind = Violation if self.keeps else Forgot
        raise kind(
            f"{operation} is False for a page whose batch_set returned True",
            f"True: retention is {self.claims.retention.name}, and nothing deleted it",
            f"False for {page_hash[:8]} of {space.pool!r}",
            tuple(self.trace.sequence(page_hash[:8])),
        )

    def refused(self, space: KeySpace, violation: Violation) -> Exception:
        """Return the error for a set that returned False: `violation`, or NotVerified."""
        if not self.refuses(space.stored_nbytes):
            return violation
        return NotVerified(
            f"the store has no room for the pages of {space.stored_nbytes} bytes that the check needs,"
            " or refuses pages at will"
        )
