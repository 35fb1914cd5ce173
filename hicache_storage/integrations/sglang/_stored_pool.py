"""Connect a host pool to the page store: its key spaces, its pages and the memory for their headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.host_pool.memory import map_memory
from hicache_storage.integrations.sglang._host_pages import flat_parts, host_pages
from hicache_storage.integrations.sglang._identity import is_logical
from hicache_storage.page_store.frame import FramedPage
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
# How many framed pages to keep. With six segments, each takes about 2 KiB.
_MAX_KEPT_PAGES = 1 << 16


class StoredPool:
    """One host pool of one rank. Thread-safe.

    If pages lie in the pool's own memory, the framed pages of a slot are kept for reuse, up to a limit.
    """

    def __init__(self, name: str, host: HostPool, identity: Identity, frame_nbytes: int) -> None:
        parts = self._parts(host, identity)
        self.name = name
        self.host = host
        self.pages = host_pages(name, host, parts)
        self.spaces = identity.spaces(name, host, self.pages.part_nbytes, self.pages.parts)
        self.is_marker = is_logical(host)
        self.is_replicated = identity.is_replicated(name, host)
        self._frame_nbytes = frame_nbytes
        self._slots = max(1, -(-host.size // host.page_size))
        # One header for each page and part is enough, because SGLang never runs two transfers of one
        # host page at the same time. A store may register this memory.
        self._headers = map_memory(self._slots * len(self.spaces) * frame_nbytes, "none")
        self.buffers = (*self.pages.buffers, self._headers)
        self._kept: dict[int, tuple[FramedPage, ...]] = {}

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
        """Return transfers that save host pages, with the headers of their slots."""
        return self._transfers(hashes, indices, self.pages.sources)

    def targets(self, hashes: Sequence[str], indices: Indices) -> list[Transfer]:
        """Return transfers that load host pages. Call `write_back` afterwards."""
        return self._transfers(hashes, indices, self.pages.targets)

    def write_back(
        self, indices: Indices, transfers: Sequence[Transfer], loaded: Sequence[bool]
    ) -> None:
        """Copy the loaded pages into the pool, unless `targets` is the pool's own memory."""
        if not self.pages.is_in_pool:
            payloads = [[page.payload for page in transfer.pages] for transfer in transfers]
            self.pages.write_back(indices, payloads, loaded)

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
            slots = self._framed(starts, pages_of(indices, len(starts)))
        parts = zip(self.spaces, zip(*slots, strict=True), strict=True)
        return [Transfer(space, hashes, pages) for space, pages in parts]

    def _slots_kept(
        self,
        starts: Sequence[int],
        indices: Indices,
        pages_of: Callable[[Indices, int], list[list[Page]]],
    ) -> list[tuple[FramedPage, ...]]:
        """Return the framed pages of each slot. Reuse the framed pages that were made before."""
        try:
            return [self._kept[start] for start in starts]
        except KeyError:
            slots = self._framed(starts, pages_of(indices, len(starts)))
            if len(self._kept) < _MAX_KEPT_PAGES:
                self._kept.update(zip(starts, slots, strict=True))
            return slots

    def _framed(
        self, starts: Sequence[int], pages: list[list[Page]]
    ) -> list[tuple[FramedPage, ...]]:
        """Return the framed pages of each slot, one for each part."""
        slots = [start // self.host.page_size for start in starts]
        return [
            tuple(FramedPage(self._header(slot, part), page) for part, page in enumerate(of_slot))
            for slot, of_slot in zip(slots, zip(*pages, strict=True), strict=True)
        ]

    def flat_transfers(self, hashes: Sequence[str], flats: Sequence[memoryview]) -> list[Transfer]:
        """Return transfers of flat pages in SGLang's memory, with new headers."""
        size = self._frame_nbytes
        split = [flat_parts(flat, self.pages.parts) for flat in flats]
        transfers: list[Transfer] = []
        for part, space in enumerate(self.spaces):
            headers = memoryview(bytearray(size * len(flats)))
            framed = [
                FramedPage(headers[n * size : (n + 1) * size], pages[part])
                for n, pages in enumerate(split)
            ]
            transfers.append(Transfer(space, hashes, framed))
        return transfers

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

    def _header(self, slot: int, part: int) -> memoryview:
        if not 0 <= slot < self._slots:
            raise ValueError(f"pool {self.name!r} has no page {slot}: it has {self._slots} pages")
        start = (slot * len(self.spaces) + part) * self._frame_nbytes
        return self._headers[start : start + self._frame_nbytes]

    @staticmethod
    def _parts(host: HostPool, identity: Identity) -> int:
        """Return how many stored pages a page is split into by `tp_lcm_size`."""
        config = identity.config
        if not config.should_split_heads or host.layout != "page_head" or not config.tp_lcm_size:
            return 1
        return config.tp_lcm_size // config.tp_size
