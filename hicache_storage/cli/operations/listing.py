"""The key spaces of a store, with the number of their pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hicache_storage.cli.progress import Meter
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage

_ADVANCE_PAGES = 256


@dataclass(frozen=True, slots=True)
class SpaceUsage:
    """A key space, and its pages. None: they were not counted."""

    space: KeySpace
    pages: int | None
    nbytes: int | None

    def as_json(self) -> dict[str, Any]:
        """Return the manifest, the id, and the figures."""
        return {
            "id": self.space.id,
            **self.space.manifest(),
            "pages": self.pages,
            "nbytes": self.nbytes,
        }


def count_pages(
    storage: HiCacheStorage, spaces: Iterable[KeySpace], meter: Meter
) -> Iterator[SpaceUsage]:
    """Yield each key space with its pages, which a scan counts."""
    for space in spaces:
        pages = nbytes = shown = 0
        for info in storage.scan(space):
            pages += 1
            nbytes += info.nbytes
            if pages - shown == _ADVANCE_PAGES:
                meter.advance(_ADVANCE_PAGES, 0)
                shown = pages
        meter.advance(pages - shown, 0)
        yield SpaceUsage(space, pages, nbytes)
