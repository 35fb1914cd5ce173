"""A host pool in the layout `page_first`, for SGLang's zero-copy backends.

The pool has the methods that the backends call on `MHATokenToKVPoolHost`, which keeps the K half and
the V half of a page in two buffers, or on `MLATokenToKVPoolHost`, which keeps a page in one buffer.
Here an index stands for a page, as if a page were a token.
"""

from __future__ import annotations

import importlib
import mmap
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from hicache_storage.page import Page

SLOTS = 512
_NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux, because only a few slots of large pages are ever touched."""


class HostPool:
    """Slots for pages of one size.

    The adapter calls `take_slots`, `fill` and `read`; SGLang calls the rest.
    """

    layout = "page_first"
    page_size = 1
    pin_memory = False

    def __init__(self, page_nbytes: int, part_nbytes: Sequence[int]) -> None:
        self._page_nbytes, self.part_nbytes = page_nbytes, tuple(part_nbytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._memory = mmap.mmap(-1, SLOTS * sum(self.part_nbytes), flags=flags)
        self.kv_buffer = _torch().frombuffer(self._memory, dtype=_torch().uint8)
        self._starts = [
            SLOTS * sum(self.part_nbytes[:part]) for part in range(len(self.part_nbytes))
        ]
        self._free = list(reversed(range(SLOTS)))
        self._returned = threading.Condition()

    @contextmanager
    def take_slots(self, count: int) -> Generator[list[int]]:
        """Wait until `count` slots are free, and reserve them for the block. Yield their indices."""
        with self._returned:
            self._returned.wait_for(lambda: len(self._free) >= count)
            slots = [self._free.pop() for _ in range(count)]
        try:
            yield slots
        finally:
            with self._returned:
                self._free.extend(reversed(slots))
                self._returned.notify_all()

    def fill(self, slot: int, page: Page) -> None:
        """Copy a page into its slot."""
        data = page.tobytes().ljust(sum(self.part_nbytes), b"\0")
        done = 0
        for address, nbytes in self._parts_of(slot):
            self._memory[address : address + nbytes] = data[done : done + nbytes]
            done += nbytes

    def read(self, slot: int, page: Page) -> None:
        """Copy a slot into a page."""
        parts = [self._memory[start : start + nbytes] for start, nbytes in self._parts_of(slot)]
        page.copy_from(b"".join(parts)[: self._page_nbytes])

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Return the address and size of every buffer of every page, in page order."""
        base = self.kv_buffer.data_ptr()
        places = [place for index in indices.tolist() for place in self._parts_of(index)]
        return [base + start for start, _ in places], [nbytes for _, nbytes in places]

    def get_hybrid_pool_buffer(self) -> list[Any]:
        """Return the buffers of the pool, which the backend registers."""
        return [
            self.kv_buffer[start : start + SLOTS * nbytes]
            for start, nbytes in zip(self._starts, self.part_nbytes, strict=True)
        ]

    def get_data_page(self, index: int, flat: bool = True) -> Any:  # noqa: FBT001, FBT002, ARG002 - SGLang's signature
        """Return a page as a flat tensor: a view if it is in one buffer, a copy if it is in two."""
        pieces = [
            self.kv_buffer[start : start + size] for start, size in self._parts_of(int(index))
        ]
        return pieces[0] if len(pieces) == 1 else _torch().cat(pieces)

    def get_dummy_flat_data_page(self) -> Any:
        """Return new memory for one page, as a flat tensor of zeros."""
        return _torch().zeros(sum(self.part_nbytes), dtype=_torch().uint8)

    def set_from_flat_data_page(self, index: int, data_page: Any) -> None:
        """Copy a flat page into a slot."""
        done = 0
        for start, nbytes in self._parts_of(int(index)):
            self.kv_buffer[start : start + nbytes] = data_page[done : done + nbytes]
            done += nbytes

    def get_ksize_per_token(self) -> int:
        """Return the size of the K half."""
        return self.part_nbytes[0]

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        """Return True if every buffer of every page begins at a multiple of `page_size_bytes`."""
        places = (self.kv_buffer.data_ptr(), *self._starts, *self.part_nbytes)
        return all(place % page_size_bytes == 0 for place in places)

    def _parts_of(self, slot: int) -> list[tuple[int, int]]:
        """Return the offset and size of each part of a slot."""
        return [
            (start + slot * nbytes, nbytes)
            for start, nbytes in zip(self._starts, self.part_nbytes, strict=True)
        ]


class WholeHostPool(HostPool):
    """A host pool whose pages are in one buffer, as in MLA."""

    def __init__(self, page_nbytes: int) -> None:
        super().__init__(page_nbytes, (page_nbytes,))


class HalvedHostPool(HostPool):
    """A host pool with K and V of a page in two buffers. Neither is empty, even for a 1-byte page."""

    def __init__(self, page_nbytes: int) -> None:
        k_nbytes = max(1, page_nbytes // 2)
        super().__init__(page_nbytes, (k_nbytes, max(1, page_nbytes - k_nbytes)))

    @property
    def k_buffer(self) -> Any:
        return self.get_hybrid_pool_buffer()[0]

    @property
    def v_buffer(self) -> Any:
        return self.get_hybrid_pool_buffer()[1]


class StateHostPool(HostPool):
    """A host pool for the state of Mamba: a temporal part and a convolution part, neither empty."""

    def __init__(self, page_nbytes: int) -> None:
        temporal_nbytes = max(1, page_nbytes // 2)
        super().__init__(page_nbytes, (temporal_nbytes, max(1, page_nbytes - temporal_nbytes)))

    @property
    def conv_buffer(self) -> list[Any]:
        return self.get_hybrid_pool_buffer()[1:]


def host_pool(page_nbytes: int, *, pool: str = "kv", replicated: bool) -> HostPool:
    """Return a host pool for pages of this size. Replicated pages are laid out as in MLA."""
    if pool == "mamba":
        return StateHostPool(page_nbytes)
    return WholeHostPool(page_nbytes) if replicated else HalvedHostPool(page_nbytes)


def _torch() -> Any:
    return importlib.import_module("torch")
