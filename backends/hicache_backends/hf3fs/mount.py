"""What one process holds open in a root: the index, its writer and its transfers."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from hicache_backends.hf3fs.index.base import Entry, Index, IndexReader, lease_s
from hicache_backends.hf3fs.index.sqlite import SqliteIndex
from hicache_backends.hf3fs.index.sqlite_reader import LookedAtDatabase, SqliteReader
from hicache_backends.hf3fs.layout import Geometry
from hicache_backends.hf3fs.settings import SQLITE
from hicache_backends.hf3fs.slot_files import SlotFiles
from hicache_backends.hf3fs.transfer import SlotPages, Transfers
from hicache_backends.hf3fs.usrbio import connect_usrbio
from hicache_backends.hf3fs.writer import Writer
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import BackendNotInstalled, HiCacheError, install_command
from hicache_storage.native import HIT, LATE, WRONG

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from hicache_backends.hf3fs.index.base import Limits, View
    from hicache_backends.hf3fs.layout import Layout, Place
    from hicache_backends.hf3fs.settings import Hf3fsSettings
    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.page import Page

_IndexT = TypeVar("_IndexT", bound=IndexReader)
_OPTIONAL_S = 1.0
"""The longest wait for a step that a call can do without: healing, and flushing access times."""
_GRACE_S = 0.5
_CLOSE_S = 8.0
_MOST_ACCESS_TIMES = 4096
_APART_NS = 1000
"""The difference between the access times of two neighboring pages of a batch.

It is large enough for Redis, which stores times as doubles.
"""
_MOST_IN_DOUBT = 1024


class ReadMount(Generic[_IndexT]):
    """The index and the transfers of a process that reads. Thread-safe."""

    def __init__(self, index: _IndexT, transfers: Transfers, counters: Counters) -> None:
        self.index = index
        self.counters = counters
        self._transfers = transfers

    def load(
        self, files: SlotFiles, hashes: Sequence[str], pages: Sequence[Page], deadline: Deadline
    ) -> list[bool]:
        """Read pages. Return for each page whether all of it was in its slot."""
        nbytes = files.geometry.nbytes
        with self.index.view(files, deadline) as view:
            places = view.find(hashes)
            wanted = [
                number
                for number, (page_hash, page) in enumerate(zip(hashes, pages, strict=True))
                if page_hash in places and page.nbytes == nbytes
            ]
            found = [hashes[number] for number in wanted]
            items = _slot_pages(files, found, places, [pages[number] for number in wanted])
            verdicts = self._transfers.read(files, items, deadline)
            whole = {
                h: places[h] for h, verdict in zip(found, verdicts, strict=True) if verdict == HIT
            }
            still = view.still(whole, _with_grace(deadline)) if whole else frozenset[str]()
        if WRONG in verdicts:
            wrong = {h: places[h] for h, v in zip(found, verdicts, strict=True) if v == WRONG}
            self._note_wrong(files, wrong, deadline)
        self._note_access(files, hashes, still, deadline)
        hits = [False] * len(hashes)
        for number, page_hash, verdict in zip(wanted, found, verdicts, strict=True):
            hits[number] = verdict == HIT and page_hash in still
        return hits

    def close(self) -> None:
        """Close everything.

        If the file system hangs, a daemon thread goes on and this call returns in time.
        """
        thread = threading.Thread(target=self._close, name="hf3fs-close", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is exiting and starts no more threads
            self._close()
        else:
            thread.join(_CLOSE_S)

    # --- parts ---------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._transfers.close()
        self.index.close()

    def _note_wrong(self, files: SlotFiles, wrong: Mapping[str, Place], deadline: Deadline) -> None:
        """Note pages that are not in their slots."""

    def _note_access(
        self, files: SlotFiles, hashes: Sequence[str], hits: AbstractSet[str], deadline: Deadline
    ) -> None:
        """Note that the pages in `hits` have just been used."""


class Mount(ReadMount[Index]):
    """The open root of one process. Thread-safe; belongs to the process that made it."""

    def __init__(
        self,
        layout: Layout,
        limits: Limits,
        counters: Counters,
        settings: Hf3fsSettings,
        *,
        direct: bool,
        local: bool,
    ) -> None:
        self._layout = layout
        self._evicts = limits.capacity_nbytes is not None
        timeout_s = settings.timeout_s
        usrbio = connect_usrbio(layout.root, wanted=settings.usrbio)
        self._writer = Writer(layout.writers)
        try:
            url = settings.index.get_secret_value()
            index = _open_index(url, layout, limits, self._writer, timeout_s)
        except BaseException:
            self._writer.close()
            raise
        super().__init__(index, Transfers(counters, usrbio, direct=direct, local=local), counters)
        self._access_times = AccessTimes(self.index, settings.touch_interval_s)
        self._in_doubt = WritesInDoubt(self.index.reclaim, lease_s(timeout_s))

    def save(
        self, files: SlotFiles, hashes: Sequence[str], pages: Sequence[Page], deadline: Deadline
    ) -> list[bool]:
        """Write the pages that are not stored yet. Return for each page whether it is stored now."""
        with self.index.writing(files, deadline) as view:
            there, late = self._present(view, files, hashes, deadline)
            absent: dict[str, Page] = {}
            for page_hash, page in zip(hashes, pages, strict=True):
                if page_hash not in there and page.nbytes == files.geometry.nbytes:
                    absent.setdefault(page_hash, page)
            for page_hash in late:
                absent.pop(page_hash, None)
            if absent:
                there |= self._write(files, absent, deadline)
        return [page_hash in there for page_hash in hashes]

    def delete(self, files: SlotFiles, hashes: Sequence[str], deadline: Deadline) -> None:
        """Remove pages."""
        with self.index.writing(files, deadline):
            self.index.delete(files, list(dict.fromkeys(hashes)), deadline)

    def clear(self, files: SlotFiles, deadline: Deadline) -> int:
        """Remove all pages of a key space. Return how many there were."""
        with self.index.writing(files, deadline):
            return self.index.clear(files)

    def remove_space(self, space_id: str, deadline: Deadline) -> int:
        """Remove a key space, readable or not. Return how many pages it had."""
        space = self._layout.key_space(space_id)
        removed = 0
        if space is not None:
            removed = self.clear(SlotFiles(self._layout, Geometry(space)), deadline)
        return removed + self.index.drop(space_id, deadline, keep_pages=space is not None)

    # --- parts ---------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._access_times.close()
        super()._close()
        self._writer.close()

    def _note_wrong(self, files: SlotFiles, wrong: Mapping[str, Place], deadline: Deadline) -> None:
        with suppress(HiCacheError):
            self._heal(files, wrong, _optional(deadline))

    def _present(
        self, view: View, files: SlotFiles, hashes: Sequence[str], deadline: Deadline
    ) -> tuple[set[str], set[str]]:
        """Return the pages that are in their slots, and the pages that were not checked in time."""
        places = view.find(hashes)
        verdicts = files.check(places, deadline) if places else dict[str, int]()
        held = {page_hash for page_hash, verdict in verdicts.items() if verdict == HIT}
        late = {page_hash for page_hash, verdict in verdicts.items() if verdict == LATE}
        self.counters.add("timeouts", len(late))
        wrong = {h: places[h] for h in verdicts.keys() - held - late}
        # If a page stayed in the index under a wrong slot, it would not be found after it was
        # written.
        self._heal(files, wrong, deadline)
        self._note_access(files, hashes, held, deadline)
        return held, late

    def _write(self, files: SlotFiles, absent: Mapping[str, Page], deadline: Deadline) -> set[str]:
        """Write pages to slots of their own. Return the pages that are stored now."""
        if self._in_doubt.is_full():
            self.counters.add("refused_in_doubt", len(absent))
            return set()
        if self._evicts:
            self._access_times.flush(_optional(deadline))
        places = self.index.reserve(files, len(absent), deadline)
        self.counters.add("refused_no_space", len(absent) - len(places))
        pages = dict(zip(absent, places, strict=False))
        items = _slot_pages(files, list(pages), pages, list(absent.values())[: len(pages)])
        try:
            done = self._transfers.write(files, items, deadline)
        except BaseException:
            self._give_up(files, places, deadline)
            raise
        return self._settle(files, pages, done, deadline)

    def _give_up(self, files: SlotFiles, places: Sequence[Place], deadline: Deadline) -> None:
        """Free the slots of a write that raised, unless the write may still be carried out."""
        if not self._transfers.is_certain:
            self._in_doubt.add(files.geometry.space.id, places)
            return
        with suppress(HiCacheError):
            self.index.settle(files, (), places, _with_grace(deadline))

    def _settle(
        self,
        files: SlotFiles,
        pages: Mapping[str, Place],
        verdicts: Sequence[int],
        deadline: Deadline,
    ) -> set[str]:
        """End a write, depending on its verdicts. Return the pages that are stored now."""
        now_ns = time.time_ns()
        entries: list[Entry] = []
        unused: list[Place] = []
        in_doubt: list[Place] = []
        for number, ((page_hash, place), verdict) in enumerate(
            zip(pages.items(), verdicts, strict=True)
        ):
            if verdict == HIT:
                entries.append(Entry(page_hash, place, now_ns - number * _APART_NS))
            elif self._transfers.is_in_doubt(verdict):
                in_doubt.append(place)
            else:
                unused.append(place)
        self._in_doubt.add(files.geometry.space.id, in_doubt)
        self.index.settle(files, entries, unused, _with_grace(deadline))
        return {entry.page_hash for entry in entries}

    def _note_access(
        self, files: SlotFiles, hashes: Sequence[str], hits: AbstractSet[str], deadline: Deadline
    ) -> None:
        """Note that the pages in `hits` have just been used."""
        if self._evicts and hits:
            used = [page_hash for page_hash in hashes if page_hash in hits]
            self._access_times.note(files.geometry.space.id, used, _optional(deadline))

    def _heal(self, files: SlotFiles, wrong: Mapping[str, Place], deadline: Deadline) -> None:
        """Forget pages that are not in their slots, so that the next set stores them."""
        if wrong:
            self.index.forget(files, wrong, deadline)
            self.counters.add("healed", len(wrong))


class AccessTimes:
    """The access times that this process has noted but not yet sent to the index. Thread-safe.

    A timer sends them after `interval_s`, even if no other call comes.
    """

    def __init__(self, index: Index, interval_s: float) -> None:
        self._index = index
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._used: dict[tuple[str, str], int] = {}
        self._flushed_s = time.monotonic()
        self._timer: threading.Timer | None = None
        self._closed = False

    def note(self, space_id: str, hashes: Iterable[str], deadline: Deadline) -> None:
        """Note that pages were just used.

        The first page counts as the latest, so that a prefix loses its tail first.
        """
        now_ns = time.time_ns()
        with self._lock:
            for index, page_hash in enumerate(hashes):
                self._used[space_id, page_hash] = now_ns - index * _APART_NS
            is_late = time.monotonic() > self._flushed_s + self._interval_s
            is_due = is_late or len(self._used) >= _MOST_ACCESS_TIMES
            if not is_due:
                self._set_timer()
        if is_due:
            self.flush(deadline)

    def flush(self, deadline: Deadline) -> None:
        """Send the times to the index.

        If that fails, the times are lost. That is allowed, because recency is not promised.
        """
        with self._lock:
            used, self._used = self._used, {}
            self._flushed_s = time.monotonic()
        if used:
            with suppress(HiCacheError):
                self._index.touch(used, deadline)

    def close(self) -> None:
        """Send the remaining times, and end the timer."""
        with self._lock:
            self._closed = True
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            timer.join(_OPTIONAL_S)
        self.flush(Deadline(_OPTIONAL_S))

    def _set_timer(self) -> None:
        if self._timer is None and not self._closed:
            timer = threading.Timer(min(self._interval_s, threading.TIMEOUT_MAX), self._on_time)
            timer.daemon = True
            with suppress(RuntimeError):  # no thread can be started now
                timer.start()
                self._timer = timer

    def _on_time(self) -> None:
        with self._lock:
            self._timer = None
        self.flush(Deadline(_OPTIONAL_S))


class WritesInDoubt:
    """Slots whose write failed but may still be carried out later. Thread-safe.

    The slots stay reserved until the writer or its lease ends. Otherwise the late write could
    overwrite another page. If there are more than `_MOST_IN_DOUBT` slots, the oldest are reclaimed
    after a lease. Until then no page is written. Otherwise each failed write would reserve one more
    slot, and in the end all pages would be evicted.
    """

    def __init__(self, reclaim: Callable[[str, Sequence[Place]], None], lease_s: float) -> None:
        self._reclaim = reclaim
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._slots: deque[tuple[float, str, Place]] = deque()

    def add(self, space_id: str, places: Sequence[Place]) -> None:
        """Keep slots reserved."""
        now_s = time.monotonic()
        with self._lock:
            self._slots += [(now_s, space_id, place) for place in places]

    def is_full(self) -> bool:
        """Return True while there are too many slots for another write."""
        with self._lock:
            old_s = time.monotonic() - self._lease_s
            while len(self._slots) > _MOST_IN_DOUBT and self._slots[0][0] < old_s:
                _, space_id, place = self._slots.popleft()
                self._reclaim(space_id, [place])
            return len(self._slots) > _MOST_IN_DOUBT


def _optional(deadline: Deadline) -> Deadline:
    """Return the deadline of a step that a call can do without."""
    return Deadline(min(_OPTIONAL_S, deadline.remaining_s() / 2))


def _with_grace(deadline: Deadline) -> Deadline:
    """Return a later deadline, by which the index can still record a transfer that ended in time."""
    return Deadline(max(_GRACE_S, deadline.remaining_s()))


def _slot_pages(
    files: SlotFiles, hashes: list[str], places: Mapping[str, Place], pages: list[Page]
) -> SlotPages:
    """Return the pages with their slots, and with their marks in the slots."""
    found = [places[page_hash] for page_hash in hashes]
    mark = files.geometry.mark
    marks = [mark(page_hash, stamp) for page_hash, (_, stamp) in zip(hashes, found, strict=True)]
    return SlotPages([slot for slot, _ in found], marks, pages)


def _open_index(
    url: str, layout: Layout, limits: Limits, writer: Writer, timeout_s: float
) -> Index:
    """Open the index that the config names."""
    if url == SQLITE:
        return SqliteIndex(layout, limits, writer, timeout_s)
    with _needs_redis():
        from hicache_backends.hf3fs.index.redis import RedisIndex  # noqa: PLC0415 - an extra
    return RedisIndex(url, layout, limits, writer, timeout_s)


def open_index_reader(url: str, layout: Layout, timeout_s: float) -> IndexReader:
    """Open the index that the config names, for reading."""
    if url == SQLITE:
        return SqliteReader(LookedAtDatabase(layout), timeout_s)
    with _needs_redis():
        from hicache_backends.hf3fs.index.redis_reader import open_reader  # noqa: PLC0415 - an extra
    return open_reader(url, layout, timeout_s)


@contextmanager
def _needs_redis() -> Generator[None]:
    try:
        yield
    except ImportError as error:
        raise BackendNotInstalled(
            "backend 'hf3fs' needs redis for an index in Redis, which is not installed:"
            f" {install_command('redis')}"
        ) from error
