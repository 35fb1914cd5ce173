"""What the stores that `file.py` compares have in common: an interface, and the memory they share."""

from __future__ import annotations

import abc
import mmap
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


class Memory:
    """Host memory of one batch: mapped and touched before anything is timed."""

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
        """Random bytes, different in every page."""
        self.whole[:] = np.frombuffer(np.random.default_rng(seed).bytes(len(self.whole)), np.uint8)

    def stamp(self, turn: int) -> None:
        """Make every page differ from what it was in any other turn, at both of its ends."""
        for number, row in enumerate(self.rows):
            mark = np.frombuffer(f"{turn:08d}{number:08d}".encode(), np.uint8)
            row[:16] = mark
            row[-16:] = mark

    def spoil(self) -> None:
        """Overwrite everything, so that only a read can make it right again."""
        self.whole[:] = 0xA5


class Store(abc.ABC):
    """A place for pages. What is timed is `set` and `get`, of the batch that was prepared last."""

    name: str

    def __init__(self, source: Memory, landing: Memory) -> None:
        self.source = source
        self.landing = landing
        self.hashes: Sequence[str] = ()

    def prepare_set(self, hashes: Sequence[str]) -> None:
        """Take over the source memory."""
        self.hashes = hashes

    @abc.abstractmethod
    def set(self) -> None:
        """Store the pages of the source memory."""

    def prepare_get(self, hashes: Sequence[str]) -> None:
        """Spoil where the pages will land."""
        self.hashes = hashes
        self.landing.spoil()

    @abc.abstractmethod
    def get(self) -> None:
        """Read into the landing memory."""

    def landed(self) -> npt.NDArray[np.uint8]:
        """What `get` brought, one page a row."""
        return self.landing.rows

    def close(self) -> None:  # noqa: B027 - many have nothing to give back
        """Give descriptors and threads back."""
