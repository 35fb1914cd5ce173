"""A pool of the cache: its slots in host memory, and how its pages are called in storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.hit_policy import HitPolicy, Pool
from hicache_storage.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.host_pool import HostPool
    from hicache_storage.keys import KeySpace


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePool:
    """One pool of the cache: target, draft or side pool, all handled alike."""

    space: KeySpace
    """Bare; its page is what `host` holds in a slot."""
    host: HostPool
    hit_policy: HitPolicy = HitPolicy.ALL_PAGES
    window_pages: int = 1
    """For TRAILING_PAGES: how many pages in front of the prefix's end are needed."""
    required: bool = True
    """No prefix is usable without it. A draft's pools may be optional, by the controller's settings."""
    writes: bool = True
    """This rank writes the pool's pages to L3: of ranks that hold the same bytes, one does."""

    def __post_init__(self) -> None:
        if self.space.page_nbytes != self.host.shape.nbytes:
            raise ValueError(
                f"pool {self.space.pool!r}: the key space says {self.space.page_nbytes} bytes a page,"
                f" the host pool holds {self.host.shape.nbytes}"
            )
        if self.space.layout != self.host.layout:
            raise ValueError(
                f"pool {self.space.pool!r}: the key space says layout {self.space.layout!r}, the host"
                f" pool has {self.host.layout!r}"
            )

    @property
    def stored(self) -> tuple[Pool, ...]:
        """As the page store sees it: a page of this pool is in storage when it is in all of these."""
        return (Pool(space=self.space, hit_policy=self.hit_policy, window_pages=self.window_pages),)

    def transfers(self, hashes: Sequence[str], slots: Sequence[int]) -> list[Transfer]:
        """The pages in `slots` on their way to or from storage: one transfer for each of `stored`."""
        return [Transfer(self.space, hashes, [self.host.framed_page(slot) for slot in slots])]
