"""Slots for pages in host memory."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

from hicache_storage.host_pool.memory import (
    cuda_runtime,
    load_torch,
    mapped,
    pin_memory,
    unpin_memory,
)
from hicache_storage.host_pool.shape import (
    STORAGE_TYPES,
    array_shape,
    check_layout,
)
from hicache_storage.host_pool.tiles import check_tiles, tile_nbytes, tile_runs, whole
from hicache_storage.page import Page
from hicache_storage.page_store.frame import FramedPage
from hicache_storage.scalars import check_integer
from hicache_storage.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt
    import torch

    from hicache_storage.host_pool.memory import HugePages
    from hicache_storage.host_pool.shape import PageShape
    from hicache_storage.host_pool.tiles import Run, Tile


# A slot never moves, so that what was made of it once serves every transfer. A view has some 200 bytes:
# so many are kept, 50 MB in all, enough for 4,000 pages of 64 segments. What comes later is made anew.
_MOST_VIEWS = 1 << 18


class HostPool:
    """Slots for pages in memory that is mapped, filled in and, for CUDA, pinned once.

    Thread-safe. Which page is in which slot is the caller's to know, and so is its identity. Views that
    were handed out keep the memory alive, also after `close`; only pinning ends there.
    """

    def __init__(
        self,
        shape: PageShape,
        *,
        slots: int,
        layout: str = "page_first",
        frame_nbytes: int = 0,
        tiles: Sequence[Tile] = (),
        huge_pages: HugePages = "none",
        pin: bool | None = None,
    ) -> None:
        """Map the memory of `slots` pages, and of a header of `frame_nbytes` for each of their tiles.

        Args:
            shape: What a page holds.
            slots: How many pages.
            layout: One of `LAYOUTS`.
            frame_nbytes: The page store's `frame_nbytes`; 0: no headers.
            tiles: What a page is cut into for the storage; none: it is not cut.
            huge_pages: For the pages; "2MiB" and "1GiB" must have been reserved in the kernel.
            pin: Lock the pages for CUDA copies. None: if torch is loaded and sees CUDA.

        Raises:
            ValueError: An argument is out of range, or the layout does not go with the shape, or it
                puts a tile into more segments than a storage takes.
            MemoryError: The machine has no room, or not as many huge pages.
            RuntimeError: `pin=True` where there is no CUDA, or CUDA refused.
            ImportError: `pin=True` without torch.
        """
        check_layout(layout, shape)
        for name, value, least in (("slots", slots, 1), ("frame_nbytes", frame_nbytes, 0)):
            check_integer(name, value, least=least)
        self.tiles: tuple[Tile, ...] = tuple(tiles) or (whole(shape),)
        check_tiles(layout, shape, slots, self.tiles)
        cuda = cuda_runtime(pin)
        self.shape = shape
        self.slots = slots
        self.layout = layout
        self.frame_nbytes = frame_nbytes
        self._lock = threading.Lock()
        self._runs = tile_runs(layout, shape, slots, whole(shape))
        self._page_nbytes = shape.nbytes  # computed by the shape each time
        self._tile_runs = [tile_runs(layout, shape, slots, tile) for tile in self.tiles]
        self._tile_nbytes = [tile_nbytes(shape, tile) for tile in self.tiles]
        self._pages = mapped(slots * shape.nbytes, huge_pages)
        self._headers = mapped(slots * len(self.tiles) * frame_nbytes, "none")
        self._allocation = Slots(slots)
        self._end_slot = slots  # 0 once closed
        self._framed: dict[int, FramedPage] = {}
        self._views = 0
        self._pinning = None
        if cuda is not None and pin_memory(self._pages, cuda, must=bool(pin)):
            self._pinning = weakref.finalize(self, unpin_memory, self._pages, cuda)
            self._pinning.atexit = False  # the driver frees what is left, and may be gone by then

    @property
    def pinned(self) -> bool:
        """The pages are locked in memory for CUDA."""
        return self._pinning is not None and self._pinning.alive

    @property
    def free_slots(self) -> int:
        """How many slots `allocate` could give."""
        return self._allocation.free_count

    @property
    def buffers(self) -> tuple[memoryview, ...]:
        """The memory that pages and headers lie in, whole, for `register_buffer`."""
        return tuple(memory for memory in (self._pages, self._headers) if memory.nbytes)

    def allocate(self, count: int) -> list[int] | None:
        """`count` slots, those that were freed first; None where there are not as many.

        Raises:
            ValueError: A negative count.
        """
        return self._allocation.allocate(count)

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back.

        Raises:
            ValueError: A slot is not in use, or is named twice. Nothing is freed then.
        """
        self._allocation.free(slots)

    def page(self, slot: int) -> Page:
        """The memory of a slot, in stored order. Borrowed: whoever allocated the slot may write it.

        Raises:
            ValueError: No such slot, or the pool was closed.
        """
        return self._view(slot, self._runs, self._page_nbytes)

    def framed_page(self, slot: int, tile: int = 0) -> FramedPage:
        """One of the slot's `tiles` with its header, for the page store. An uncut page is one tile.

        Raises:
            ValueError: No such slot or tile, the pool was closed, or has no headers.
        """
        if 0 <= tile < len(self.tiles):
            kept = self._framed.get(slot * len(self.tiles) + tile)
            if kept is not None:
                return kept
        return self._new_framed_page(slot, tile)

    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """The same memory as one numpy array a plane, shaped as the layout says.

        In the dtype where numpy has it, else in unsigned integers as wide.
        """
        import numpy as np  # noqa: PLC0415 - not everyone who opens a pool looks inside

        storage = np.dtype(STORAGE_TYPES[self.shape.dtype])
        return tuple(
            np.frombuffer(self._plane(plane), storage).reshape(self._array_shape(plane))
            for plane in range(len(self.shape.planes))
        )

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The same memory as one tensor a plane, in its dtype, shaped as the layout says.

        Raises:
            ImportError: There is no torch.
        """
        import numpy as np  # noqa: PLC0415

        torch = load_torch()
        dtype = getattr(torch, self.shape.dtype)
        # Through numpy, which holds the memory: a tensor made of the buffer itself would not.
        return tuple(
            torch.from_numpy(np.frombuffer(self._plane(plane), np.uint8))
            .view(dtype)
            .view(self._array_shape(plane))
            for plane in range(len(self.shape.planes))
        )

    def close(self) -> None:
        """Unpin and let go of the memory; it is unmapped with the last view of it. Idempotent."""
        with self._lock:
            self._end_slot = 0
            if self._pinning is not None:
                self._pinning()
            self._pages = self._headers = memoryview(b"")
            self._framed = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_framed_page(self, slot: int, tile: int) -> FramedPage:
        kept = (
            self._framed
        )  # where another thread closes the pool meanwhile, nobody looks there again
        size = self.frame_nbytes
        if not size:
            raise ValueError("this host pool has no headers: open it with the store's frame_nbytes")
        if not 0 <= tile < len(self.tiles):
            raise ValueError(f"there is no tile {tile}: pages are cut into {len(self.tiles)}")
        payload = self._view(slot, self._tile_runs[tile], self._tile_nbytes[tile])
        number = slot * len(self.tiles) + tile
        framed = FramedPage(self._headers[number * size : (number + 1) * size], payload)
        if self._views < _MOST_VIEWS:
            self._views += len(payload.segments)
            kept[number] = framed
        return framed

    def _view(self, slot: int, runs: list[Run], nbytes: int) -> Page:
        if not 0 <= slot < self._end_slot:
            raise ValueError(self._refusal(slot))
        memory = self._pages
        views = [
            memory[start + slot * stride : start + slot * stride + length]
            for start, length, stride in runs
        ]
        return Page.of_views(tuple(views), nbytes)

    def _plane(self, plane: int) -> memoryview:
        if not self._end_slot:
            raise ValueError(self._refusal(0))
        sizes = [self.slots * nbytes for nbytes in self.shape.plane_nbytes]
        start = sum(sizes[:plane])
        return self._pages[start : start + sizes[plane]]

    def _array_shape(self, plane: int) -> tuple[int, ...]:
        return array_shape(self.layout, self.shape, plane, self.slots)

    def _refusal(self, slot: int) -> str:
        if not self._end_slot:
            return "this host pool was closed: open a new one"
        return f"there is no slot {slot}: this host pool has slots 0 to {self.slots - 1}"
