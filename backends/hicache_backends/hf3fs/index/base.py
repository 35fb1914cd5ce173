"""What an index answers: which page is in which slot, and which slots may be written to.

A slot belongs to a page, to a writer (reserved) or to nobody (free). A page leaves the index before its
slot is given to a writer. So a reader whose page is still in the index, under the same stamp, when it
has read the slot, has read that page and nothing else.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from hicache_backends.hf3fs.slot_files import SlotFiles
    from hicache_backends.hf3fs.slots import Place
    from hicache_storage.backend_support.deadline import Deadline


_LEASES_PER_TIMEOUT = 2
_LEASE_MARGIN_S = 5.0


def lease_s(timeout_s: float) -> float:
    """Return for how long a slot is a writer's that may not be heard of again.

    A call has written what it reserved, or given it up, `timeout_s` after it began. The rest is margin.
    """
    return timeout_s * _LEASES_PER_TIMEOUT + _LEASE_MARGIN_S


@dataclass(frozen=True, slots=True)
class Limits:
    """What all slots that are in use may take together, and when eviction begins and ends."""

    capacity_nbytes: int | None
    high_watermark: float
    low_watermark: float

    def to_evict(self, used_nbytes: int, wanted_nbytes: int) -> int:
        """How many bytes must go so that so many more have room."""
        if self.capacity_nbytes is None:
            return 0
        if used_nbytes + wanted_nbytes <= self.capacity_nbytes * self.high_watermark:
            return 0
        return used_nbytes + wanted_nbytes - int(self.capacity_nbytes * self.low_watermark)

    def room(self, used_nbytes: int) -> int | None:
        """How many more bytes there may be; None: any number."""
        if self.capacity_nbytes is None:
            return None
        return max(0, self.capacity_nbytes - used_nbytes)


class Entry(NamedTuple):
    """A page that was written to a reserved slot."""

    page_hash: str
    place: Place
    used_ns: int


class View(abc.ABC):
    """The index as one call that reads pages sees it."""

    @abc.abstractmethod
    def find(self, hashes: Sequence[str]) -> dict[str, Place]:
        """Return where those of the pages are that are there."""

    @abc.abstractmethod
    def still(self, places: Mapping[str, Place], deadline: Deadline) -> set[str]:
        """Return those of the pages that have been there ever since."""


class Index(abc.ABC):
    """Thread-safe. Raises StorageUnavailable and StorageTimeout only; the latter by the deadline."""

    used_nbytes: int = 0
    """Of all slots in use, when this process last looked."""
    evicted: int = 0
    """Pages that this process evicted."""

    @abc.abstractmethod
    def view(self, files: SlotFiles, deadline: Deadline) -> AbstractContextManager[View]:
        """Open the index for one call that reads."""

    @abc.abstractmethod
    def writing(self, files: SlotFiles, deadline: Deadline) -> AbstractContextManager[View]:
        """Open the index for one call that writes: while it lasts nobody makes the index anew."""

    @abc.abstractmethod
    def reserve(self, files: SlotFiles, count: int, deadline: Deadline) -> list[Place]:
        """Return slots that this writer alone may write to; fewer where there is no more room."""

    @abc.abstractmethod
    def settle(
        self,
        files: SlotFiles,
        entries: Sequence[Entry],
        unused: Sequence[Place],
        deadline: Deadline,
    ) -> None:
        """Note that pages are in their slots from now on; slots that are `unused` are free again.

        A page that another writer was quicker with stays where it is.
        """

    @abc.abstractmethod
    def reclaim(self, space_id: str, places: Sequence[Place]) -> None:
        """Free reserved slots with the next `reserve`."""

    @abc.abstractmethod
    def forget(self, files: SlotFiles, wrong: Mapping[str, Place], deadline: Deadline) -> None:
        """Free the slots of pages that turned out not to be there, if the index still says they are."""

    @abc.abstractmethod
    def delete(self, files: SlotFiles, hashes: Sequence[str], deadline: Deadline) -> None:
        """Remove pages; their slots are spoiled."""

    @abc.abstractmethod
    def clear(self, files: SlotFiles) -> int:
        """Remove all pages of the key space, give all its free slots back; return how many pages.

        It goes step by step, each with a deadline of its own. All of it is done, or it raises.
        """

    @abc.abstractmethod
    def touch(self, used: Mapping[tuple[str, str], int], deadline: Deadline) -> None:
        """Note when pages, by (key-space id, page hash), were used."""

    @abc.abstractmethod
    def pages(self, files: SlotFiles) -> Iterator[str]:
        """Iterate over every page of the key space; no lock is held between two steps.

        Each step has a deadline of its own.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""
