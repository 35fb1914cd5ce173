"""Find out which stores of a composition answer, before a verb looks at them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_storage.composition.parts import undivided
from hicache_storage.errors import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.storage import HiCacheStorage


@dataclass(frozen=True, slots=True)
class Answering:
    """The stores that hold the pages of a storage, by whether they answer. A plain store has none."""

    whole: HiCacheStorage
    parts: Mapping[str, HiCacheStorage] = field(default_factory=dict[str, "HiCacheStorage"])
    """The stores that answer, by name."""
    failed: Mapping[str, HiCacheError] = field(default_factory=dict[str, HiCacheError])
    """The errors of the others."""

    @classmethod
    def of(cls, storage: HiCacheStorage) -> Answering:
        """Ask each store."""
        parts: dict[str, HiCacheStorage] = {}
        failed: dict[str, HiCacheError] = {}
        for name, part in undivided(storage).items() if storage.parts() else ():
            try:
                part.diagnose()
                any(True for _ in part.spaces() if part.capabilities.enumerable)
                parts[name] = part
            except HiCacheError as error:
                failed[name] = error
        return cls(storage, parts, failed)

    @property
    def readable(self) -> Mapping[str, HiCacheStorage]:
        """What can be listed: all of it as "" if every store answers, otherwise each one that does."""
        return self.parts if self.failed else {"": self.whole}
