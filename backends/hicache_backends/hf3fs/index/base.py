"""The contract of an index: which page is in which slot, and which slots may be written to.

A slot belongs to a page, to a writer (reserved) or to nobody (free). A page leaves the index before
its slot is given to a writer. So a reader looks a page up before and after it reads the slot: if
the page is still there, under the same stamp, the reader has read that page and nothing else.
"""

from __future__ import annotations

import abc
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hicache_storage.backend_support.single_flight import SingleFlight
from hicache_storage.errors import StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from contextlib import AbstractContextManager

    from hicache_backends.hf3fs.layout import Place
    from hicache_backends.hf3fs.slot_files import SlotFiles
    from hicache_storage.backend_support.deadline import Deadline

AT_OPEN_S = 10.0**8
"""The time limit of a rebuild at opening: practically none.

A program that gave up would only begin the rebuild again.
"""

MOST_AHEAD_NS = 300 * 10**9
"""A page whose time is further ahead than this has no known time, and counts as the oldest one."""
_LEASES_PER_TIMEOUT = 2
_LEASE_MARGIN_S = 5.0
_CLOSE_S = 5.0


def lease_s(timeout_s: float) -> float:
    """Return the time after which a reserved slot of a silent writer may be given to another writer.

    After `timeout_s` a call has written its slots or given them up. The rest of the lease is
    margin.
    """
    return timeout_s * _LEASES_PER_TIMEOUT + _LEASE_MARGIN_S


@dataclass(frozen=True, slots=True)
class Limits:
    """The capacity for all slots in use together, and the bounds of eviction."""

    capacity_nbytes: int | None
    high_watermark: float
    low_watermark: float

    def to_evict(self, used_nbytes: int, wanted_nbytes: int) -> int:
        """Return the bytes to evict before `wanted_nbytes` more are used."""
        if self.capacity_nbytes is None:
            return 0
        if used_nbytes + wanted_nbytes <= self.capacity_nbytes * self.high_watermark:
            return 0
        return used_nbytes + wanted_nbytes - int(self.capacity_nbytes * self.low_watermark)

    def free_nbytes(self, used_nbytes: int) -> int | None:
        """Return the bytes that the capacity leaves, or None if there is no capacity."""
        if self.capacity_nbytes is None:
            return None
        return max(0, self.capacity_nbytes - used_nbytes)


class Entry(NamedTuple):
    """A page that was written to a reserved slot."""

    page_hash: str
    place: Place
    used_ns: int
    """By this host's clock. An index adds what this clock is behind."""


class View(abc.ABC):
    """The index, as one call that reads pages sees it."""

    @abc.abstractmethod
    def find(self, hashes: Sequence[str]) -> dict[str, Place]:
        """Return the places of those pages that are stored."""

    @abc.abstractmethod
    def still(self, places: Mapping[str, Place], deadline: Deadline) -> AbstractSet[str]:
        """Return the pages that have stayed in their places since `find`."""


MOST_COUNTED = 1000
"""Pages with a wrong time are counted only up to this number."""


class Figures(NamedTuple):
    """The figures of all key spaces together."""

    used_nbytes: int
    """The bytes of all slots in use."""
    from_future: int
    """How many pages have a time of use in the future, up to `MOST_COUNTED`."""


class IndexReader(abc.ABC):
    """The half of an index that only reads.

    Thread-safe. Raises only StorageUnavailable and, by the deadline, StorageTimeout.
    """

    used_nbytes: int = 0
    """The bytes of all slots in use, as this process last saw them."""
    evicted: int = 0
    """How many pages this process has evicted."""

    @abc.abstractmethod
    def view(self, files: SlotFiles, deadline: Deadline) -> AbstractContextManager[View]:
        """Open the index for one call that reads."""

    @abc.abstractmethod
    def used_ns(
        self, files: SlotFiles, hashes: Sequence[str], deadline: Deadline
    ) -> dict[str, int]:
        """Return the access times of the stored pages, as they were last saved."""

    @abc.abstractmethod
    def pages(self, files: SlotFiles) -> Iterator[str]:
        """Yield every page of the key space. Hold no lock between two steps.

        Each step has its own deadline.
        """

    @abc.abstractmethod
    def figures(self, now_ns: int, deadline: Deadline) -> Figures:
        """Return the current figures."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close everything. Idempotent."""


class Index(IndexReader):
    """An index for a storage that also writes."""

    @abc.abstractmethod
    def writing(self, files: SlotFiles, deadline: Deadline) -> AbstractContextManager[View]:
        """Open the index for one call that writes.

        No process rebuilds the index until the call ends.
        """

    @abc.abstractmethod
    def reserve(self, files: SlotFiles, count: int, deadline: Deadline) -> list[Place]:
        """Return slots that only this writer may write to, or fewer if the capacity is used up."""

    @abc.abstractmethod
    def settle(
        self,
        files: SlotFiles,
        entries: Sequence[Entry],
        unused: Sequence[Place],
        deadline: Deadline,
    ) -> None:
        """Add pages that were written, and free slots that were not used.

        If another writer has added a page in the meantime, that page keeps its place.
        """

    @abc.abstractmethod
    def reclaim(self, space_id: str, places: Sequence[Place]) -> None:
        """Free reserved slots at the next `reserve`."""

    @abc.abstractmethod
    def forget(self, files: SlotFiles, wrong: Mapping[str, Place], deadline: Deadline) -> None:
        """Remove pages that were not found in their slots, and free these slots. Keep moved pages."""

    @abc.abstractmethod
    def delete(self, files: SlotFiles, hashes: Sequence[str], deadline: Deadline) -> None:
        """Remove pages, and invalidate their slots."""

    @abc.abstractmethod
    def clear(self, files: SlotFiles) -> int:
        """Remove all pages of the key space, and deallocate its free slots.

        Return the number of pages.

        Each step has its own deadline. Either everything is done, or an error is raised.
        """

    @abc.abstractmethod
    def touch(self, used: Mapping[tuple[str, str], int], deadline: Deadline) -> None:
        """Store the access times of pages, by (key-space id, page hash) and this host's clock."""

    @abc.abstractmethod
    def drop(self, space_id: str, deadline: Deadline, *, keep_pages: bool) -> int:
        """Remove a key space with its files. Return the number of its pages.

        If a writer has slots there, or with `keep_pages` if there are pages, the key space stays
        and the result is 0.
        """


class Rebuild:
    """The rebuild of a lost index from the marks of the slots.

    A rebuild may outlast the call that begins it.

    At most one rebuild runs at a time, on its own thread, for all calls that need it. Belongs to
    one process.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._flight = SingleFlight("hf3fs-index", work)
        self._closed = threading.Event()

    def run(self, deadline: Deadline) -> None:
        """Begin a rebuild or join the running one. Wait for its end, and raise its error.

        Raises:
            StorageTimeout: The rebuild did not end by the deadline. It goes on without this call.
            StorageUnavailable: The system cannot start a thread. The next call begins the rebuild.
        """
        flight = self._flight.wait(deadline.remaining_s())
        if flight is None:
            raise StorageTimeout(
                "hf3fs: the index is being rebuilt, which takes longer"
                f" than {deadline.timeout_s:g} s: it is used when that is done"
            )
        flight.result()

    def check(self) -> None:
        """Raise if the storage was closed. The work calls this now and then.

        Raises:
            StorageUnavailable: The storage was closed.
        """
        if self._closed.is_set():
            raise StorageUnavailable(
                "hf3fs: the storage was closed while the index was being rebuilt"
            )

    def close(self) -> None:
        """Make the work end, and wait for it, but only for a limited time. Idempotent."""
        self._closed.set()
        self._flight.wait_idle(_CLOSE_S)
