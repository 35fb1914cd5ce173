"""What one process holds open of a root: its index, its writer's lock, the memory of its transfers."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from hicache_backends.hf3fs.access_times import APART_NS, AccessTimes
from hicache_backends.hf3fs.index.base import Entry, lease_s
from hicache_backends.hf3fs.index.sqlite import SqliteIndex
from hicache_backends.hf3fs.transfer import Item, Outcome, Transfers
from hicache_backends.hf3fs.usrbio import usrbio_of
from hicache_backends.hf3fs.writer import Writer
from hicache_backends.hf3fs.writes_in_doubt import WritesInDoubt
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import BackendNotInstalled, HiCacheError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_backends.hf3fs.index.base import Index, Limits, View
    from hicache_backends.hf3fs.layout import Layout
    from hicache_backends.hf3fs.slot_files import SlotFiles
    from hicache_backends.hf3fs.slots import Place
    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.page import Page

SQLITE = "sqlite"
_OPTIONAL_S = 1.0
"""The longest that a call waits for what it can do without: healing, and telling what was used."""
_GRACE_S = 0.5
_CLOSE_S = 8.0


class Mount:
    """Thread-safe; belongs to the process that made it."""

    def __init__(
        self,
        layout: Layout,
        limits: Limits,
        counters: Counters,
        *,
        index: str,
        usrbio: bool | None,
        direct: bool,
        local: bool,
        timeout_s: float,
        touch_interval_s: float,
    ) -> None:
        self._counters = counters
        self._recency = limits.capacity_nbytes is not None
        rings = usrbio_of(layout.root, wanted=usrbio)
        self._writer = Writer(layout.writers)
        try:
            self.index = _opened(index, layout, limits, self._writer, timeout_s)
        except BaseException:
            self._writer.close()
            raise
        self._touches = AccessTimes(self.index, touch_interval_s)
        self._transfers = Transfers(counters, rings, direct=direct, local=local)
        self._in_doubt = WritesInDoubt(self.index.reclaim, lease_s(timeout_s))

    def load(
        self, files: SlotFiles, hashes: Sequence[str], pages: Sequence[Page], deadline: Deadline
    ) -> list[bool]:
        """Read pages; return which of them were there, whole."""
        with self.index.view(files, deadline) as view:
            places = view.find(hashes)
            wanted = {
                number: Item(*_marked(files, page_hash, places[page_hash]), page)
                for number, (page_hash, page) in enumerate(zip(hashes, pages, strict=True))
                if page_hash in places and page.nbytes == files.geometry.nbytes
            }
            read = self._transfers.read(files, list(wanted.values()), deadline)
            found = dict(zip(wanted, read, strict=True))
            whole = {number for number, outcome in found.items() if outcome is Outcome.MOVED}
            looked_up = {hashes[n]: places[hashes[n]] for n in whole}
            still = view.still(looked_up, _with_grace(deadline)) if whole else set[str]()
        wrong = [hashes[n] for n, outcome in found.items() if outcome is Outcome.WRONG]
        with suppress(HiCacheError):
            self._heal(files, {h: places[h] for h in wrong}, _optional(deadline))
        self._used(files, hashes, still, deadline)
        return [n in whole and page_hash in still for n, page_hash in enumerate(hashes)]

    def save(
        self, files: SlotFiles, hashes: Sequence[str], pages: Sequence[Page], deadline: Deadline
    ) -> list[bool]:
        """Write the pages that are not there; return which are there now."""
        with self.index.writing(files, deadline) as view:
            there = self._present(view, files, hashes, deadline)
            absent = {
                page_hash: page
                for page_hash, page in reversed(list(zip(hashes, pages, strict=True)))
                if page_hash not in there and page.nbytes == files.geometry.nbytes
            }
            if absent:
                order = [h for h in dict.fromkeys(hashes) if h in absent]
                there |= self._written(files, {h: absent[h] for h in order}, deadline)
        return [page_hash in there for page_hash in hashes]

    def delete(self, files: SlotFiles, hashes: Sequence[str], deadline: Deadline) -> None:
        """Remove pages."""
        with self.index.writing(files, deadline):
            self.index.delete(files, list(dict.fromkeys(hashes)), deadline)

    def clear(self, files: SlotFiles, deadline: Deadline) -> int:
        """Remove all pages of a key space; return how many that were."""
        with self.index.writing(files, deadline):
            return self.index.clear(files)

    def close(self) -> None:
        """Give everything back, but what a file system that hangs does not let go of in time."""
        closing = threading.Thread(target=self._close, name="hf3fs-close", daemon=True)
        try:
            closing.start()
        except RuntimeError:  # the interpreter ends, and lets no thread begin
            self._close()
        else:
            closing.join(_CLOSE_S)

    # --- parts ---------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._touches.tell(Deadline(_OPTIONAL_S))
        self._transfers.close()
        self.index.close()
        self._writer.close()

    def _present(
        self, view: View, files: SlotFiles, hashes: Sequence[str], deadline: Deadline
    ) -> set[str]:
        """Return those of the pages that are there, and are what the index says they are."""
        places = view.find(hashes)
        held = files.held(places) if places else set[str]()
        wrong = {h: place for h, place in places.items() if h not in held}
        # A page that stays in the index under a wrong slot would not be found after it was written.
        self._heal(files, wrong, deadline)
        self._used(files, hashes, held, deadline)
        return held

    def _written(
        self, files: SlotFiles, absent: Mapping[str, Page], deadline: Deadline
    ) -> set[str]:
        """Write pages to slots of their own; return those that are there now."""
        if self._in_doubt.is_full():
            self._counters.add("refused_in_doubt", len(absent))
            return set()
        if self._recency:
            self._touches.tell(_optional(deadline))
        places = self.index.reserve(files, len(absent), deadline)
        self._counters.add("refused_no_space", len(absent) - len(places))
        pages = dict(zip(absent, places, strict=False))
        items = [
            Item(*_marked(files, page_hash, place), absent[page_hash])
            for page_hash, place in pages.items()
        ]
        try:
            done = self._transfers.write(files, items, deadline)
        except BaseException:
            self._broken_off(files, places, deadline)
            raise
        return self._settled(files, pages, done, deadline)

    def _broken_off(self, files: SlotFiles, places: Sequence[Place], deadline: Deadline) -> None:
        """Give slots back, unless they may be written to later."""
        if not self._transfers.is_certain:
            self._in_doubt.add(files.geometry.space.id, places)
            return
        with suppress(HiCacheError):
            self.index.settle(files, (), places, _with_grace(deadline))

    def _settled(
        self,
        files: SlotFiles,
        pages: Mapping[str, Place],
        done: Sequence[Outcome],
        deadline: Deadline,
    ) -> set[str]:
        """Tell the index what came of a write; return the pages that are there now."""
        now_ns = time.time_ns()
        outcomes = list(zip(pages.items(), done, strict=True))
        entries = [
            Entry(page_hash, place, now_ns - number * APART_NS)
            for number, ((page_hash, place), outcome) in enumerate(outcomes)
            if outcome is Outcome.MOVED
        ]
        doubtful = [place for (_, place), outcome in outcomes if outcome is Outcome.IN_DOUBT]
        self._in_doubt.add(files.geometry.space.id, doubtful)
        unused = [place for (_, place), outcome in outcomes if outcome is Outcome.NOT_MOVED]
        self.index.settle(files, entries, unused, _with_grace(deadline))
        return {entry.page_hash for entry in entries}

    def _used(
        self, files: SlotFiles, hashes: Sequence[str], hit: set[str], deadline: Deadline
    ) -> None:
        """Note that those of the pages that are hits were used just now."""
        if self._recency and hit:
            used = [page_hash for page_hash in hashes if page_hash in hit]
            self._touches.note(files.geometry.space.id, used, _optional(deadline))

    def _heal(self, files: SlotFiles, wrong: Mapping[str, Place], deadline: Deadline) -> None:
        """Forget pages that are not where the index says, so that the next set stores them."""
        if wrong:
            self.index.forget(files, wrong, deadline)
            self._counters.add("healed", len(wrong))


def _optional(deadline: Deadline) -> Deadline:
    """Return the deadline of a step that a call can do without."""
    return Deadline(min(_OPTIONAL_S, deadline.remaining_s() / 2))


def _with_grace(deadline: Deadline) -> Deadline:
    """Return a deadline by which what was moved just in time can still be told of."""
    return Deadline(max(_GRACE_S, deadline.remaining_s()))


def _marked(files: SlotFiles, page_hash: str, place: Place) -> tuple[int, bytes]:
    """A page's slot, and the mark that it has there."""
    return place.slot, files.geometry.mark(page_hash, place.stamp)


def _opened(url: str, layout: Layout, limits: Limits, writer: Writer, timeout_s: float) -> Index:
    """Open the index that the config names."""
    if url == SQLITE:
        return SqliteIndex(layout, limits, writer, timeout_s)
    try:
        from hicache_backends.hf3fs.index.redis import RedisIndex  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise BackendNotInstalled(
            "backend 'hf3fs' needs redis for an index in Redis, which is not installed:"
            ' pip install "hicache-storage[redis]"'
        ) from error
    return RedisIndex(url, layout, limits, writer, timeout_s)
