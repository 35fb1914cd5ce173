"""Slots for pages in host memory."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

from hicache_storage.host_pool.memory import (
    cuda_runtime,
    load_torch,
    map_memory,
    pin_memory,
    unpin_memory,
)
from hicache_storage.host_pool.shape import (
    STORAGE_TYPES,
    array_shape,
    check_layout,
)
from hicache_storage.host_pool.tiles import check_tiles, tile_nbytes, tile_runs, whole_page
from hicache_storage.page import Page
from hicache_storage.scalars import check_integer, counted
from hicache_storage.slot_allocator import SlotAllocator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt
    import torch

    from hicache_storage.host_pool.memory import HugePages
    from hicache_storage.host_pool.shape import PageShape
    from hicache_storage.host_pool.tiles import Run, Tile


# A slot never moves, so its views are cached for later transfers. A view takes about 200 bytes. The
# cache holds 50 MB of them: 4,000 pages of 64 segments. Further views are made for each transfer.
_MAX_CACHED_VIEWS = 1 << 18


class HostPool:
    """Slots for pages in memory that is mapped, populated and, for CUDA, pinned once.

    Thread-safe. The caller tracks the pages in the slots and their identities. Views keep the memory
    alive even after `close`, which only ends the pinning.
    """

    def __init__(
        self,
        shape: PageShape,
        *,
        slots: int,
        layout: str = "page_first",
        tiles: Sequence[Tile] = (),
        huge_pages: HugePages = "none",
        pin: bool | None = None,
    ) -> None:
        """Map the memory for `slots` pages.

        Args:
            shape: The content of a page.
            slots: The number of pages.
            layout: One of `LAYOUTS`.
            tiles: The tiles of a page in the storage, or empty if pages are not cut.
            huge_pages: The kind of huge pages. The kernel must have reserved "2MiB" or "1GiB" pages.
            pin: Lock the pages for CUDA copies. None: do so if torch is loaded and finds CUDA.

        Raises:
            ValueError: An argument is out of range, the layout does not support the shape, or a tile has
                more segments than a storage accepts.
            MemoryError: The machine lacks memory or huge pages.
            RuntimeError: `pin=True`, but CUDA is missing or refused.
            ImportError: `pin=True`, but torch is missing.
        """
        check_layout(layout, shape)
        check_integer("slots", slots, least=1)
        self.tiles: tuple[Tile, ...] = tuple(tiles) or (whole_page(shape),)
        check_tiles(layout, shape, slots, self.tiles)
        cuda = cuda_runtime(pin)
        self.shape = shape
        self.slots = slots
        self.layout = layout
        self._lock = threading.Lock()
        self._runs = tile_runs(layout, shape, slots, whole_page(shape))
        self._page_nbytes = shape.nbytes  # the shape computes it on each access
        self._tile_runs = [tile_runs(layout, shape, slots, tile) for tile in self.tiles]
        self._tile_nbytes = [tile_nbytes(shape, tile) for tile in self.tiles]
        self._pages = map_memory(slots * shape.nbytes, huge_pages)
        self._allocation = SlotAllocator(slots)
        self._end_slot = slots  # `close` sets it to 0
        self._tile_pages: dict[int, Page] = {}
        self._views = 0
        self._pinning = None
        if cuda is not None and pin_memory(self._pages, cuda, required=bool(pin)):
            self._pinning = weakref.finalize(self, unpin_memory, self._pages, cuda)
            self._pinning.atexit = False  # at exit, the driver frees the pages, and may be unloaded

    @property
    def pinned(self) -> bool:
        """True while the pages are locked in memory for CUDA."""
        return self._pinning is not None and self._pinning.alive

    @property
    def free_slots(self) -> int:
        """Number of slots that `allocate` can return."""
        return self._allocation.free_count

    @property
    def buffers(self) -> tuple[memoryview, ...]:
        """All memory of pages, for `register_buffer`."""
        return (self._pages,) if self._pages.nbytes else ()

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` slots, least recently freed first, or None if fewer are free.

        Raises:
            ValueError: `count` is negative.
        """
        return self._allocation.allocate(count)

    def free(self, slots: Iterable[int]) -> None:
        """Free slots.

        Raises:
            ValueError: A slot is not in use, or is given twice. No slot is freed then.
        """
        self._allocation.free(slots)

    def page(self, slot: int) -> Page:
        """Return the memory of a slot, in stored order. The owner of the slot may write it.

        Raises:
            ValueError: The slot does not exist, or the pool was closed.
        """
        return self._view(slot, self._runs, self._page_nbytes)

    def tile_page(self, slot: int, tile: int = 0) -> Page:
        """Return one of the slot's `tiles`, for the page store. An uncut page is one tile.

        Raises:
            ValueError: The slot or tile does not exist, or the pool was closed.
        """
        if 0 <= tile < len(self.tiles):
            cached = self._tile_pages.get(slot * len(self.tiles) + tile)
            if cached is not None:
                return cached
        return self._new_tile_page(slot, tile)

    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """Return the memory of the pages as one numpy array for each plane, in the shape of the layout.

        A dtype that numpy lacks is replaced by unsigned integers of its width.
        """
        import numpy as np  # noqa: PLC0415 - most pools need no arrays

        storage = np.dtype(STORAGE_TYPES[self.shape.dtype])
        return tuple(
            np.frombuffer(self._plane(plane), storage).reshape(self._array_shape(plane))
            for plane in range(len(self.shape.planes))
        )

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the memory of the pages as one tensor for each plane, in the shape of the layout.

        Raises:
            ImportError: torch is missing.
        """
        import numpy as np  # noqa: PLC0415

        torch = load_torch()
        dtype = getattr(torch, self.shape.dtype)
        # A tensor of a numpy array keeps the memory alive. A tensor of the buffer itself does not.
        return tuple(
            torch.from_numpy(np.frombuffer(self._plane(plane), np.uint8))
            .view(dtype)
            .view(self._array_shape(plane))
            for plane in range(len(self.shape.planes))
        )

    def close(self) -> None:
        """Unpin and release the memory, which is unmapped when its last view is gone. Idempotent."""
        with self._lock:
            self._end_slot = 0
            if self._pinning is not None:
                self._pinning()
            self._pages = memoryview(b"")
            self._tile_pages = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_tile_page(self, slot: int, tile: int) -> Page:
        # `close` replaces the dictionary, so a page that is added here after `close` is never used.
        cache = self._tile_pages
        if not 0 <= tile < len(self.tiles):
            raise ValueError(
                f"there is no tile {tile}: pages are cut into {counted(len(self.tiles), 'tile')}"
            )
        page = self._view(slot, self._tile_runs[tile], self._tile_nbytes[tile])
        if self._views < _MAX_CACHED_VIEWS:
            self._views += len(page.segments)
            cache[slot * len(self.tiles) + tile] = page
        return page

    def _view(self, slot: int, runs: list[Run], nbytes: int) -> Page:
        if not 0 <= slot < self._end_slot:
            raise ValueError(self._slot_error(slot))
        memory = self._pages
        views = [
            memory[start + slot * stride : start + slot * stride + length]
            for start, length, stride in runs
        ]
        return Page.of_views(tuple(views), nbytes)

    def _plane(self, plane: int) -> memoryview:
        if not self._end_slot:
            raise ValueError(self._slot_error(0))
        sizes = [self.slots * nbytes for nbytes in self.shape.plane_nbytes]
        start = sum(sizes[:plane])
        return self._pages[start : start + sizes[plane]]

    def _array_shape(self, plane: int) -> tuple[int, ...]:
        return array_shape(self.layout, self.shape, plane, self.slots)

    def _slot_error(self, slot: int) -> str:
        if not self._end_slot:
            return "this host pool was closed: open a new one"
        return f"there is no slot {slot}: this host pool has slots 0 to {self.slots - 1}"
