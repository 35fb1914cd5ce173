"""Wrong stores: what readers that were killed keep from being removed."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.file_a_page import Shelf

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import PageInfo


@caught_by("KV-402", check="killed_readers_leave_nothing_that_grows")
class WaitsForDeadReaders(Shelf):
    """What is deleted while somebody lists is kept until all have ended: who was killed never does."""

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        return self._marked(super().scan(space))

    def _marked(self, infos: Iterator[PageInfo]) -> Iterator[PageInfo]:
        marker = self._root / f".reader-{os.getpid()}-{secrets.token_hex(4)}"
        marker.touch()
        try:
            yield from infos
        finally:
            marker.unlink(missing_ok=True)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        if not any(self._root.glob(".reader-*")):
            for kept in self._root.glob(".kept-*"):
                kept.unlink(missing_ok=True)
            return super()._removed(space, page_hash)
        with suppress(FileNotFoundError):
            self._path(space, page_hash).rename(self._root / f".kept-{secrets.token_hex(8)}")
        return True
