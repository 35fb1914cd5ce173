"""Connect a host pool to the page store: its key spaces and its pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.integrations.sglang._host_pages import flat_parts, host_pages
from hicache_storage.integrations.sglang._identity import is_logical
from hicache_storage.page_store.lookup import HitPolicy, PoolSpec
from hicache_storage.page_store.results import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.integrations.sglang._engine import HostPool, Indices
    from hicache_storage.integrations.sglang._identity import Identity
    from hicache_storage.page import Page

# The limits for one call. With more pages or bytes, a slow store could not meet the deadline.
_BATCH_PAGES = 128
_BATCH_NBYTES = 256 << 20
# How many pages to keep. With six segments, each takes about 1 KiB.
_MAX_KEPT_PAGES = 1 << 16


class StoredPool:
    """One host pool of one rank. Thread-safe.

    If pages lie in the pool's own memory, the pages of a slot are kept for reuse, up to a limit.
    """

    def __init__(self, name: str, host: HostPool, identity: Identity) -> None:
        parts = self._parts(host, identity)
        self.name = name
        self.host = host
        self.pages = host_pages(name, host, parts)
        self.spaces = identity.spaces(name, host, self.pages.part_nbytes, self.pages.parts)
        self.is_marker = is_logical(host)
        self.is_replicated = identity.is_replicated(name, host)
        self.buffers = self.pages.buffers
        self._kept: dict[int, tuple[Page, ...]] = {}

    @property
    def page_nbytes(self) -> int:
        """Payload bytes of a page, summed over its parts."""
        return self.pages.part_nbytes * self.pages.parts

    @property
    def batch_pages(self) -> int:
        """The most pages for one call of the page store."""
        return max(1, min(_BATCH_PAGES, _BATCH_NBYTES // self.page_nbytes))

    def specs(
        self, policy: HitPolicy = HitPolicy.ALL_PAGES, window_pages: int = 1
    ) -> list[PoolSpec]:
        """Return the pool's key spaces for a prefix lookup.

        A page counts only if every part is stored.
        """
        return [
            PoolSpec(space=space, hit_policy=policy, window_pages=window_pages)
            for space in self.spaces
        ]

    def sources(self, hashes: Sequence[str], indices: Indices) -> list[Transfer]:
        """Return transfers that save host pages."""
        return self._transfers(hashes, indices, self.pages.sources)

    def targets(self, hashes: Sequence[str], indices: Indices) -> list[Transfer]:
        """Return transfers that load host pages. Call `write_back` afterwards."""
        return self._transfers(hashes, indices, self.pages.targets)

    def write_back(
        self, indices: Indices, transfers: Sequence[Transfer], loaded: Sequence[bool]
    ) -> None:
        """Copy the loaded pages into the pool, unless `targets` is the pool's own memory."""
        if not self.pages.is_in_pool:
            self.pages.write_back(indices, [list(transfer.pages) for transfer in transfers], loaded)

    def _transfers(
        self,
        hashes: Sequence[str],
        indices: Indices,
        pages_of: Callable[[Indices, int], list[list[Page]]],
    ) -> list[Transfer]:
        starts: list[int] = indices[:: len(indices) // len(hashes)].tolist()
        if self.pages.is_in_pool:
            slots = self._slots_kept(starts, indices, pages_of)
        else:
            slots = list(zip(*pages_of(indices, len(starts)), strict=True))
        parts = zip(self.spaces, zip(*slots, strict=True), strict=True)
        return [Transfer(space, hashes, pages) for space, pages in parts]

    def _slots_kept(
        self,
        starts: Sequence[int],
        indices: Indices,
        pages_of: Callable[[Indices, int], list[list[Page]]],
    ) -> list[tuple[Page, ...]]:
        """Return the pages of each slot, one for each part. Reuse those that were made before."""
        try:
            return [self._kept[start] for start in starts]
        except KeyError:
            slots = list(zip(*pages_of(indices, len(starts)), strict=True))
            if len(self._kept) < _MAX_KEPT_PAGES:
                self._kept.update(zip(starts, slots, strict=True))
            return slots

    def flat_transfers(self, hashes: Sequence[str], flats: Sequence[memoryview]) -> list[Transfer]:
        """Return transfers of flat pages in SGLang's memory."""
        split = [flat_parts(flat, self.pages.parts) for flat in flats]
        parts = zip(self.spaces, zip(*split, strict=True), strict=True)
        return [Transfer(space, hashes, pages) for space, pages in parts]

    def check_indices(self, hashes: Sequence[str], indices: Indices | None) -> Indices:
        """Return `indices` if there is one for each token of `hashes`.

        Raises:
            ValueError: There are more or fewer indices than tokens.
        """
        wanted = len(hashes) * self.host.page_size
        if indices is None or len(indices) != wanted:
            given = "none" if indices is None else len(indices)
            raise ValueError(
                f"pool {self.name!r}: {len(hashes)} pages have {wanted} host indices, not {given}"
            )
        return indices

    @staticmethod
    def _parts(host: HostPool, identity: Identity) -> int:
        """Return how many stored pages a page is split into by `tp_lcm_size`."""
        config = identity.config
        if not config.should_split_heads or host.layout != "page_head" or not config.tp_lcm_size:
            return 1
        return config.tp_lcm_size // config.tp_size
