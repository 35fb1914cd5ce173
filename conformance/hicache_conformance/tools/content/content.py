"""The contents of a test's pages, and a registry of the pages that the test has set."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from hicache_conformance.tools.content.cells import Identity, stream
from hicache_conformance.tools.content.diagnosis import UNTOUCHED, ExpectedPage, describe

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["UNTOUCHED", "PageRegistry", "content", "diagnose"]


def content(space_id: str, page_hash: str, nbytes: int, version: int = 0) -> bytes:
    """Return the bytes of a page, which depend only on the arguments. Every 32 bytes name the page.

    A shorter page is the start of a longer one.

    Raises:
        ValueError: An id is not hex text of 8 digits or more, or the version does not fit 32 bits.
    """
    return stream(Identity.of(space_id, page_hash, version), 0, nbytes).tobytes()


def diagnose(
    received: bytes | memoryview, *, space_id: str, page_hash: str, allowed: Sequence[bytes]
) -> str:
    """Describe `received`, given that one of `allowed` was expected for this page.

    An empty `allowed` means that a miss was expected. The text names other pages by the start of
    their hash, because only a `PageRegistry` has the whole hash.
    """
    return PageRegistry().explain(received, space_id=space_id, page_hash=page_hash, allowed=allowed)


class PageRegistry:
    """The pages that a test has set, to diagnose bytes of another page. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[int, tuple[str, str]] = {}
        self._known: dict[Identity, None] = {}

    def add(self, space_id: str, page_hash: str, version: int = 0) -> None:
        """Add a version of a page."""
        identity = Identity.of(space_id, page_hash, version)
        with self._lock:
            self._names[identity.tag] = (space_id, page_hash)
            self._known[identity] = None

    def content(self, space_id: str, page_hash: str, nbytes: int, version: int = 0) -> bytes:
        """Return the bytes of a page, and add the page to the registry."""
        self.add(space_id, page_hash, version)
        return content(space_id, page_hash, nbytes, version)

    def __contains__(self, page: tuple[str, str, int]) -> bool:
        with self._lock:
            return Identity.of(*page) in self._known

    def __len__(self) -> int:
        with self._lock:
            return len(self._known)

    def diagnose(
        self,
        received: bytes | memoryview,
        *,
        expected: Sequence[tuple[str, str, int]],
        nbytes: int | None = None,
    ) -> str:
        """Describe `received`, given that one of `expected` (space id, page hash, version) was expected.

        The first of `expected` names the page of the call. `nbytes` is the length of that page, in
        case the length of `received` is wrong.

        Raises:
            ValueError: `expected` is empty.
        """
        if not expected:
            raise ValueError("name the page of the call: `expected` is empty")
        size = memoryview(received).nbytes if nbytes is None else nbytes
        space_id, page_hash, _ = expected[0]
        allowed = [content(space, page, size, version) for space, page, version in expected]
        return self.explain(received, space_id=space_id, page_hash=page_hash, allowed=allowed)

    def explain(
        self,
        received: bytes | memoryview,
        *,
        space_id: str,
        page_hash: str,
        allowed: Sequence[bytes],
    ) -> str:
        """Describe `received`, given that one of the contents `allowed` was expected."""
        own = Identity.of(space_id, page_hash)
        with self._lock:
            known, names = tuple(self._known), dict(self._names)
        page = ExpectedPage(
            own=own,
            right=[np.frombuffer(each, dtype=np.uint8) for each in allowed],
            names={**names, own.tag: (space_id, page_hash)},
            known=known,
        )
        return describe(np.frombuffer(received, dtype=np.uint8), page)
