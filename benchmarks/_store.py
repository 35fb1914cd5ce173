"""The interface of the compared stores, the memory of a batch, and the turns that move it."""

from __future__ import annotations

import mmap
import statistics
import time
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from _harness import Candidate, console, page_hashes_of
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt


Direction: TypeAlias = Literal["get", "set"]
DIRECTIONS: tuple[Direction, ...] = ("set", "get")


class Memory:
    """Host memory for one batch. It is mapped and touched before anything is measured."""

    def __init__(self, pages: int, page_nbytes: int) -> None:
        self.pages = pages
        self.page_nbytes = page_nbytes
        memory = memoryview(mmap.mmap(-1, pages * page_nbytes))
        self.whole = np.frombuffer(memory, np.uint8)
        self.rows: npt.NDArray[np.uint8] = self.whole.reshape(pages, page_nbytes)
        starts = range(0, len(memory), page_nbytes)
        self.views = [memory[start : start + page_nbytes] for start in starts]
        self.whole[:] = 0

    @property
    def gb(self) -> float:
        """The size of the batch in GB."""
        return len(self.whole) / 1e9

    def fill(self, seed: int) -> None:
        """Fill the pages with random bytes. All pages differ."""
        self.whole[:] = np.frombuffer(np.random.default_rng(seed).bytes(len(self.whole)), np.uint8)

    def stamp(self, turn: int) -> None:
        """Change both ends of every page, so that its contents differ from those of any other turn."""
        for number, row in enumerate(self.rows):
            mark = np.frombuffer(f"{turn:08d}{number:08d}".encode(), np.uint8)
            row[:16] = mark
            row[-16:] = mark

    def overwrite(self) -> None:
        """Overwrite everything, so that only a read can restore the contents."""
        self.whole[:] = 0xA5


class Store:
    """A store of pages. The timed calls are `set` and `get` of the batch that was prepared last."""

    name: str

    def __init__(self, source: Memory, destination: Memory) -> None:
        self.source = source
        self.destination = destination
        self.hashes: Sequence[str] = ()

    def prepare_set(self, hashes: Sequence[str]) -> None:
        """Choose the hashes under which `set` stores the pages of the source memory."""
        self.hashes = hashes

    def set(self) -> None:
        """Store the pages of the source memory."""
        self.set_part(self.hashes, slice(None))

    def prepare_get(self, hashes: Sequence[str]) -> None:
        """Choose the hashes of the pages that `get` reads, and overwrite the destination memory."""
        self.hashes = hashes
        self.destination.overwrite()

    def get(self) -> None:
        """Read the pages into the destination memory."""
        self.get_part(self.hashes, slice(None))

    def set_part(self, hashes: Sequence[str], part: slice) -> None:
        """Store a part of the source memory under `hashes`. Threads call this for different parts.

        Raises:
            NotImplementedError: The store accepts only whole batches.
        """
        raise NotImplementedError

    def get_part(self, hashes: Sequence[str], part: slice) -> None:
        """Read pages into a part of the destination memory. Threads call this for different parts.

        Raises:
            NotImplementedError: The store accepts only whole batches.
        """
        raise NotImplementedError

    def received(self) -> npt.NDArray[np.uint8]:
        """Return the result of `get`, one page per row."""
        return self.destination.rows

    def read_back(self, hashes: Sequence[str]) -> None:
        """Read pages, and prove that they equal the source memory."""
        self.prepare_get(hashes)
        self.get()
        self.prove()

    def prove(self) -> None:
        """Raise an exception unless the received pages equal the source memory."""
        if not np.array_equal(self.received(), self.source.rows):
            raise RuntimeError(f"{self.name} did not bring back what was set")

    def clear(self) -> None:
        """Delete the batch that was prepared last. Stores that evict do not need this."""

    def close(self) -> None:
        """Close descriptors and stop threads."""


def nothing() -> None:
    """Do nothing: the store evicts, or is a new one each time."""


class BatchRun(Candidate):
    """A candidate that moves one batch in one direction, and records this process's processor time."""

    def __init__(
        self,
        store: Store,
        direction: Direction,
        *,
        empty: Callable[[], object] = nothing,
        repeats: bool = False,
    ) -> None:
        """Move a new batch each time, in a store that `empty` has emptied.

        With `repeats` every turn moves the same batch. For a get, the batch is set once beforehand.
        """
        self.store = store
        self.name = store.name
        self.cpu_s: list[float] = []
        self.direction = direction
        self._gets = direction == "get"
        self._empty = empty
        self._repeats = repeats
        self.hashes: list[str] = []

    def prepare(self, turn: int) -> None:
        store = self.store
        if not (self._repeats and self.hashes):
            self._empty()
            label = f"{self.name} {self.direction}"
            self.hashes = page_hashes_of(label, turn, store.source.pages)
            store.source.stamp(turn)
            store.prepare_set(self.hashes)
            if self._gets:
                store.set()
        if self._gets:
            store.prepare_get(self.hashes)

    def run(self) -> None:
        began_s = time.process_time()
        (self.store.get if self._gets else self.store.set)()
        self.cpu_s.append(time.process_time() - began_s)

    def check(self) -> None:
        if self._gets:
            self.store.prove()
        else:
            self.store.read_back(self.hashes)


def print_cpu(turns: Sequence[BatchRun], work: float) -> None:
    """Print the processor time of each client, which would be the same on a real network."""
    shown = Table(title="processor time of the client", title_justify="left")
    shown.add_column("candidate")
    shown.add_column("s/GB", justify="right")
    for turn in turns:
        shown.add_row(turn.name, f"{statistics.median(turn.cpu_s[1:]) / work:.2f}")
    console.print(shown)


def memories(pages: int, page_nbytes: int) -> tuple[Memory, Memory]:
    """Return memory for a batch to set, with random bytes, and memory for a batch to get."""
    source = Memory(pages, page_nbytes)
    source.fill(page_nbytes)
    return source, Memory(pages, page_nbytes)
