"""What a store's answers are held against: what it must hold, must miss, and may forget or refuse."""

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
    """A page is missing that a store may forget, but forgot only in this situation."""


class Oracle(abc.ABC):
    """The judge of single answers: the capabilities of the store choose what is right."""

    trace: Trace

    @property
    @abc.abstractmethod
    def claims(self) -> Capabilities:
        """What the store claims."""

    @abc.abstractmethod
    def hashes(self, count: int) -> list[str]:
        """Page hashes that nobody has had before."""

    @abc.abstractmethod
    def contents(
        self, space: KeySpace, hashes: Sequence[str], version: int = 0
    ) -> dict[str, bytes]:
        """The bytes of pages."""

    @abc.abstractmethod
    def refuses(self, nbytes: int) -> bool:
        """Whether it is the store's habit to refuse pages of this size, or so many pages."""

    @abc.abstractmethod
    def forgets(self, probe: Probe) -> bool:
        """Whether it is the store's habit to forget pages."""

    @property
    def keeps(self) -> bool:
        """Whether a page must be there until it is deleted."""
        return self.claims.retention is Retention.UNTIL_DELETED

    def stored(self, probe: Probe, space: KeySpace, count: int, **options: Any) -> dict[str, bytes]:
        """`count` fresh pages, set. A set that was refused is a violation: there is room for a few."""
        pages = self.contents(space, self.hashes(count))
        self.must_set(probe, space, pages, **options)
        return pages

    def must_set(
        self, probe: Probe, space: KeySpace, pages: Mapping[str, bytes], **options: Any
    ) -> None:
        """Set pages; every verdict must be True.

        Raises:
            NotVerified: The store refuses pages by habit, these among them.
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
        """Hold a read of every page against what may be there; how many were hits.

        A hit must be one of the contents given. A miss is a violation where the store keeps pages until
        they are deleted; where it may forget, it is one if it forgets only here (`Forgot`).
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
        """Neither exists nor get may say True; `why` is the reason, as in "was deleted".

        Of no hashes nothing is asked: an empty batch is the business of KV-201 alone.
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
            "batch_delete is False for a page, though nothing is wrong with the store",
            expected="True: it is gone, or was not there. False says that it may still be there",
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
        """What to raise for a hit with bytes that are none of those allowed."""
        return probe.violation(
            "batch_get is True with bytes that were never set under this hash",
            expected=f"the {space.stored_nbytes} bytes that were set, or a miss",
            got=f"{page_hash[:8]}: {self.diagnosed(space, page_hash, data, allowed)}",
            sequence=self.trace.sequence(page_hash[:8]),
        )

    def diagnosed(
        self, space: KeySpace, page_hash: str, data: bytes, allowed: Sequence[bytes]
    ) -> str:
        """What wrong bytes are, in words."""
        return diagnose(data, space_id=space.id, page_hash=page_hash, allowed=allowed)

    def missed(
        self, probe: Probe, space: KeySpace, page_hash: str, operation: str = "batch_get"
    ) -> None:
        """Judge a miss of a page whose set returned True: it returns where the store may forget."""
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
        """What to raise where a set returned False: the violation, unless that is the store's habit."""
        if not self.refuses(space.stored_nbytes):
            return violation
        return NotVerified(
            f"the store has no room for the pages of {space.stored_nbytes} bytes that the check needs,"
            " or refuses pages at will"
        )
