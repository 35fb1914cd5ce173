"""The interface of the compared stores, and the memory of one batch."""

from __future__ import annotations

import abc
import mmap
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


class Memory:
    """Host memory of one batch. It is mapped and touched before any measurement."""

    def __init__(self, pages: int, page_nbytes: int) -> None:
        self.pages = pages
        self.page_nbytes = page_nbytes
        memory = memoryview(mmap.mmap(-1, pages * page_nbytes))
        self.whole = np.frombuffer(memory, np.uint8)
        self.rows: npt.NDArray[np.uint8] = self.whole.reshape(pages, page_nbytes)
        starts = range(0, len(memory), page_nbytes)
        self.views = [memory[start : start + page_nbytes] for start in starts]
        self.whole[:] = 0

    def fill(self, seed: int) -> None:
        """Fill the pages with random bytes, which differ in every page."""
        self.whole[:] = np.frombuffer(np.random.default_rng(seed).bytes(len(self.whole)), np.uint8)

    def stamp(self, turn: int) -> None:
        """Make every page differ at both ends from its contents in any other turn."""
        for number, row in enumerate(self.rows):
            mark = np.frombuffer(f"{turn:08d}{number:08d}".encode(), np.uint8)
            row[:16] = mark
            row[-16:] = mark

    def overwrite(self) -> None:
        """Overwrite everything, so that only a read can restore the contents."""
        self.whole[:] = 0xA5


class Store(abc.ABC):
    """A store of pages. The timed calls are `set` and `get` of the batch that was prepared last."""

    name: str

    def __init__(self, source: Memory, destination: Memory) -> None:
        self.source = source
        self.destination = destination
        self.hashes: Sequence[str] = ()

    def prepare_set(self, hashes: Sequence[str]) -> None:
        """Take the hashes of the pages in the source memory."""
        self.hashes = hashes

    @abc.abstractmethod
    def set(self) -> None:
        """Store the pages of the source memory."""

    def prepare_get(self, hashes: Sequence[str]) -> None:
        """Overwrite the destination memory."""
        self.hashes = hashes
        self.destination.overwrite()

    @abc.abstractmethod
    def get(self) -> None:
        """Read the pages into the destination memory."""

    def set_part(self, hashes: Sequence[str], part: slice) -> None:
        """Store a part of the source memory under `hashes`. Threads call it for different parts.

        Raises:
            NotImplementedError: The store takes whole batches alone.
        """
        raise NotImplementedError

    def get_part(self, hashes: Sequence[str], part: slice) -> None:
        """Read pages into a part of the destination memory. Threads call it for different parts.

        Raises:
            NotImplementedError: The store takes whole batches alone.
        """
        raise NotImplementedError

    def received(self) -> npt.NDArray[np.uint8]:
        """Return the result of `get`, one page a row."""
        return self.destination.rows

    def close(self) -> None:  # noqa: B027 - many stores have nothing to close
        """Close descriptors and stop threads."""
