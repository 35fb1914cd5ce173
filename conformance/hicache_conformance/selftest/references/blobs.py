"""A store that takes one address and one length for each page, as a native client does."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING

from hicache_conformance.selftest.references.dict_store import DictStore

if TYPE_CHECKING:
    from hicache_storage.page import Page


class Blobs(DictStore):
    """A store for pages of one segment. It also takes unaligned pages, and `stats` counts them."""

    capabilities = replace(DictStore.capabilities, scatter_gather=False, alignment=512)

    def _taken(self, page: Page) -> bytes:
        return ctypes.string_at(self._address(page), page.nbytes)

    def _filled(self, page: Page, data: bytes | None) -> bool:
        if data is None or len(data) != page.nbytes:
            return False
        ctypes.memmove(self._address(page), data, len(data))
        return True

    def _address(self, page: Page) -> int:
        ((address, nbytes),) = page.addresses
        alignment = self.capabilities.alignment
        if address % alignment or nbytes % alignment:
            self._counters.add("unaligned")
        return address
