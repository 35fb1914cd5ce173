"""What one process holds open of a root: its index, its writer's lock, the memory of its transfers."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from hicache_backends.hf3fs._index import Entry
from hicache_backends.hf3fs._sqlite_index import SqliteIndex
from hicache_backends.hf3fs._touches import APART_NS, Touches
from hicache_backends.hf3fs._transfer import Item, Transfers
from hicache_backends.hf3fs._usrbio import usrbio_of
from hicache_backends.hf3fs._writer import Writer
from hicache_storage.errors import BackendNotInstalled, HiCacheError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_backends.hf3fs._index import Index, Limits, View
    from hicache_backends.hf3fs._layout import Layout
    from hicache_backends.hf3fs._slot import Place
    from hicache_backends.hf3fs._slot_files import SlotFiles
    from hicache_storage.counters import Counters
    from hicache_storage.page import Page

SQLITE = "sqlite"


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
        timeout_s: float,
        touch_interval_s: float,
    ) -> None:
        self._counters = counters
        self._timeout_s = timeout_s
        self._recency = limits.capacity_nbytes is not None
        rings = usrbio_of(layout.root, timeout_s, wanted=usrbio)
        self._writer = Writer(layout.writers)
        try:
            self.index = _opened(index, layout, limits, self._writer, timeout_s)
        except BaseException:
            self._writer.close()
            raise
        self._touches = Touches(self.index, touch_interval_s)
        self._transfers = Transfers(counters, rings, direct=direct)

    def load(self, files: SlotFiles, hashes: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Read pages; which of them were there, whole."""
        deadline_s = time.monotonic() + self._timeout_s
        with self.index.view(files) as view:
            places = view.find(hashes)
            wanted = {
                number: Item(*_marked(files, page_hash, places[page_hash]), page)
                for number, (page_hash, page) in enumerate(zip(hashes, pages, strict=True))
                if page_hash in places and page.nbytes == files.geometry.nbytes
            }
            read = self._transfers.read(files, list(wanted.values()), deadline_s)
            found = dict(zip(wanted, read, strict=True))
            still = view.still({hashes[n]: places[hashes[n]] for n, hit in found.items() if hit})
        wrong = [hashes[number] for number, hit in found.items() if hit is False]
        self._heal(files, {page_hash: places[page_hash] for page_hash in wrong})
        self._used(files, hashes, still)
        return [bool(found.get(n)) and page_hash in still for n, page_hash in enumerate(hashes)]

    def save(self, files: SlotFiles, hashes: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Write the pages that are not there; which are there now."""
        deadline_s = time.monotonic() + self._timeout_s
        with self.index.writing(files) as view:
            there = self._present(view, files, hashes)
            absent = {
                page_hash: page
                for page_hash, page in reversed(list(zip(hashes, pages, strict=True)))
                if page_hash not in there and page.nbytes == files.geometry.nbytes
            }
            if absent:
                order = [h for h in dict.fromkeys(hashes) if h in absent]
                there |= self._written(files, {h: absent[h] for h in order}, deadline_s)
        return [page_hash in there for page_hash in hashes]

    def delete(self, files: SlotFiles, hashes: Sequence[str]) -> None:
        """Remove pages."""
        with self.index.writing(files):
            self.index.delete(files, list(dict.fromkeys(hashes)))

    def clear(self, files: SlotFiles) -> int:
        """Remove all pages of a key space; how many that were."""
        with self.index.writing(files):
            return self.index.clear(files)

    def close(self) -> None:
        """Give everything back."""
        self._touches.tell()
        self._transfers.close()
        self.index.close()
        self._writer.close()

    def abandon(self) -> None:
        """Leave everything to the process that forked this one."""
        self.index.abandon()
        self._writer.forget()

    # --- parts ---------------------------------------------------------------------------------------

    def _present(self, view: View, files: SlotFiles, hashes: Sequence[str]) -> set[str]:
        """Those of the pages that are there, and are what the index says they are."""
        places = view.find(hashes)
        held = files.held(places) if places else set[str]()
        self._heal(files, {h: place for h, place in places.items() if h not in held})
        self._used(files, hashes, held)
        return held

    def _written(self, files: SlotFiles, absent: Mapping[str, Page], deadline_s: float) -> set[str]:
        """Write pages to slots of their own; those that are there now."""
        if self._recency:
            self._touches.tell()
        places = self.index.reserve(files, len(absent))
        self._counters.add("refused_no_space", len(absent) - len(places))
        pages = dict(zip(absent, places, strict=False))
        items = [
            Item(*_marked(files, page_hash, place), absent[page_hash])
            for page_hash, place in pages.items()
        ]
        try:
            done = self._transfers.write(files, items, deadline_s)
        except BaseException:
            with suppress(HiCacheError):
                self.index.settle(files, (), places)
            raise
        now_ns = time.time_ns()
        entries = [
            Entry(page_hash, place, now_ns - number * APART_NS)
            for number, ((page_hash, place), ok) in enumerate(zip(pages.items(), done, strict=True))
            if ok
        ]
        unused = [place for place, ok in zip(places, done, strict=True) if not ok]
        self.index.settle(files, entries, unused)
        return {entry.page_hash for entry in entries}

    def _used(self, files: SlotFiles, hashes: Sequence[str], hit: set[str]) -> None:
        """Those of the pages that are hits were used just now."""
        if self._recency and hit:
            used = [page_hash for page_hash in hashes if page_hash in hit]
            self._touches.note(files.geometry.space.id, used)

    def _heal(self, files: SlotFiles, wrong: Mapping[str, Place]) -> None:
        """Forget pages that are not where the index says, so that the next set stores them."""
        if not wrong:
            return
        with suppress(HiCacheError):
            self.index.forget(files, wrong)
            self._counters.add("healed", len(wrong))


def _marked(files: SlotFiles, page_hash: str, place: Place) -> tuple[int, bytes]:
    """A page's slot, and the mark that it has there."""
    return place.slot, files.geometry.mark(page_hash, place.stamp)


def _opened(url: str, layout: Layout, limits: Limits, writer: Writer, timeout_s: float) -> Index:
    """The index that the config names."""
    if url == SQLITE:
        return SqliteIndex(layout, limits, writer, timeout_s)
    try:
        from hicache_backends.hf3fs._redis_index import RedisIndex  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise BackendNotInstalled(
            "backend 'hf3fs' needs redis for an index in Redis, which is not installed:"
            ' pip install "hicache-storage[redis]"'
        ) from error
    return RedisIndex(url, layout, limits, writer, timeout_s)
