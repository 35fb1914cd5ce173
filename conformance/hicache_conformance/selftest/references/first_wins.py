"""A store that keeps the first bytes of a page."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hicache_conformance.selftest.references.dict_store import DictStore

if TYPE_CHECKING:
    from collections.abc import Hashable

    from hicache_conformance.selftest.references.dict_store import Stored


class FirstWins(DictStore):
    """A store in which a set of a present page returns True and changes nothing."""

    capabilities = replace(DictStore.capabilities, overwrites=False, revocable=True)

    def _put(self, key: Hashable, stored: Stored) -> None:
        if key not in self._pages:
            super()._put(key, stored)
