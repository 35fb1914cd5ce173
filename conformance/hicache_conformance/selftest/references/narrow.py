"""Right stores with narrow limits: batches of few pages or few bytes, and tiny pages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_conformance.selftest.references.wire import WireStore

if TYPE_CHECKING:
    from hicache_conformance.selftest.references.dict_store import DictSettings


class OneByOne(WireStore):
    """A store behind a server that takes one page per call."""

    capabilities = replace(WireStore.capabilities, max_batch=1)


class ShelfOfPairs(Shelf):
    """A store of files that takes two pages per call."""

    capabilities = replace(Shelf.capabilities, max_batch=2)


class FewBytes(Shelf):
    """A store of files that takes 32 KiB of pages per call."""

    capabilities = replace(Shelf.capabilities, max_batch_nbytes=32 << 10)


class TinyPages(DictStore):
    """A store of pages of up to 64 bytes."""

    capabilities = replace(DictStore.capabilities, max_page_nbytes=64)

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings.model_copy(update={"max_page_nbytes": 64}))
