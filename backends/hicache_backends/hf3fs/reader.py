"""The reading half of `hf3fs`: a storage that reads a root and changes nothing there."""

from __future__ import annotations

import abc
import errno
import os
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from hicache_backends.hf3fs.index.base import MOST_AHEAD_NS, MOST_COUNTED, IndexReader, Limits
from hicache_backends.hf3fs.layout import BLOCK_NBYTES, Geometry, Layout, written_ns
from hicache_backends.hf3fs.mount import ReadMount, open_index_reader
from hicache_backends.hf3fs.settings import DEFAULT_PARALLELISM, SQLITE, Hf3fsSettings
from hicache_backends.hf3fs.slot_files import SlotFiles
from hicache_backends.hf3fs.transfer import Transfers
from hicache_storage import native
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.filesystem import is_local
from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.backend_support.read_only import Reader, over_capacity
from hicache_storage.backend_support.shared_resource import CallGate
from hicache_storage.backend_support.vectored_io import DIRECT, takes_direct_reads
from hicache_storage.errors import HiCacheError, StorageUnavailable
from hicache_storage.settings import counted, format_nbytes
from hicache_storage.storage import (
    Capabilities,
    Diagnosis,
    Durability,
    PageFault,
    PageInfo,
    PageTimes,
    Retention,
    StorageStats,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.storage import UnreadableSpace

_MountT = TypeVar("_MountT", bound=ReadMount[Any])
_MOST_SPACES = 4096
"""How many key spaces are remembered.

Clients decide how many there are, by their tenants and salts.
"""
_NO_RIGHT_HERE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT})


class SlotReader(Reader, Generic[_MountT]):
    """The calls that read, for storages with any kind of mount."""

    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.CRASH,
        shared=True,
        enumerable=True,
        overwrites=False,
        alignment=BLOCK_NBYTES,
        revocable=True,
        parallelism=DEFAULT_PARALLELISM,
    )
    usable_after_fork = True

    def __init__(self, settings: Hf3fsSettings, layout: Layout) -> None:
        self._settings = settings
        self._layout = layout
        self._gate = ForkLocal(CallGate, close=lambda _: None)
        self._files_of = lru_cache(_MOST_SPACES)(partial(_slot_files, layout))
        self._limits = Limits(
            capacity_nbytes=settings.capacity_nbytes,
            high_watermark=settings.high_watermark,
            low_watermark=settings.low_watermark,
        )
        self._local = is_local(layout.root)
        wants_direct = not self._local if settings.direct is None else settings.direct
        self._direct = wants_direct and _takes_direct(layout)
        self._mount: ForkLocal[_MountT]
        self.declare(settings)

    @classmethod
    def would_create(cls, config: Mapping[str, Any]) -> str | None:
        return Layout.missing_root(Hf3fsSettings.parse("hf3fs", config).path)

    @classmethod
    def would_claim(cls, config: Mapping[str, Any]) -> Capabilities:
        settings = Hf3fsSettings.parse("hf3fs", config)
        return _claims(cls.capabilities, settings, direct=settings.direct is True)

    def declare(self, settings: Hf3fsSettings) -> None:
        """Claim what these settings and the place allow, in the same way for both openings."""
        vars(self)["capabilities"] = _claims(self.capabilities, settings, direct=self._direct)

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        with (
            self._call() as (mount, deadline),
            mount.index.view(self._files_of(space), deadline) as view,
        ):
            places = view.find(hashes)
            return [page_hash in places for page_hash in hashes]

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        with self._call() as (mount, deadline):
            return mount.load(self._files_of(space), hashes, pages, deadline)

    def spaces(self) -> Iterator[KeySpace]:
        with self._call():
            return iter(list(self._layout.key_spaces(skip_unreadable=True)))

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        return self._scan(space)

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        """Return the write times from the stamps and, if there is a capacity, the access times."""
        files = self._files_of(space)
        with self._call() as (mount, deadline):
            used_ns = mount.index.used_ns(files, hashes, deadline)
            with mount.index.view(files, deadline) as view:
                places = view.find(hashes)
        evicts = self._settings.capacity_nbytes is not None
        return [
            PageTimes(
                written_at_s=written_ns(places[page_hash].stamp) / 1e9,
                used_at_s=used_ns[page_hash] / 1e9 if evicts and page_hash in used_ns else None,
                used_within_s=self._settings.touch_interval_s if evicts else 0.0,
            )
            if page_hash in places
            else PageTimes()
            for page_hash in hashes
        ]

    def faults(self, space: KeySpace, hashes: Sequence[str] | None = None) -> Iterator[PageFault]:
        """Yield a fault for each of `hashes` whose page is not in its slot.

        Without `hashes` there are none, because no page can have a wrong length: all slots are
        equally long.
        """
        self.ensure_open()
        return iter(()) if hashes is None else self._faults_of(space, hashes)

    def unreadable_spaces(self) -> Iterator[UnreadableSpace]:
        with self._call():
            return iter(list(self._layout.unreadable_spaces()))

    def diagnose(self) -> list[Diagnosis]:
        with self._call() as (mount, deadline):
            figures = mount.index.figures(time.time_ns() + MOST_AHEAD_NS, deadline)
            largest = max(
                (
                    Geometry(space).slot_nbytes
                    for space in self._layout.key_spaces(skip_unreadable=True)
                ),
                default=0,
            )
        found: list[Diagnosis] = []
        capacity, used = self._settings.capacity_nbytes, figures.used_nbytes
        if capacity is not None and used > capacity:
            found.append(over_capacity(used, capacity, self._limits.to_evict(used, 0)))
        elif capacity is not None:
            free_nbytes = max(0, int(capacity * self._limits.high_watermark) - used)
            is_full = self._limits.to_evict(used, largest) > 0
            fact = (
                "the store is at its high watermark: a new page evicts the least recently used ones"
                if is_full
                else f"{format_nbytes(free_nbytes)} are free"
            )
            found.append(Diagnosis("capacity", fact, is_full=is_full, free_nbytes=free_nbytes))
        if figures.from_future:
            more = " or more" if figures.from_future == MOST_COUNTED else ""
            found.append(
                Diagnosis(
                    "clock",
                    f"{counted(figures.from_future, 'page')}{more} with a time of use in the"
                    " future",
                    "synchronize the clocks of all hosts; these pages are evicted first, unless they"
                    " are read again",
                )
            )
        return found

    def stats(self) -> StorageStats:
        self.ensure_open()
        mount = self._mount.get()
        counters = mount.counters.snapshot()
        if mount.index.evicted:
            counters["evicted"] = mount.index.evicted
        return StorageStats(
            nbytes=mount.index.used_nbytes,
            capacity_nbytes=self._settings.capacity_nbytes,
            counters=counters,
        )

    def close(self) -> None:
        super().close()
        if self._gate.get().close():
            self._mount.close()

    # --- parts ---------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _open_root(self) -> _MountT:
        """Open the root in this process."""

    @contextmanager
    def _call(self) -> Generator[tuple[_MountT, Deadline], None, None]:
        """Lend the mount to one call. After `close`, the last call closes the mount."""
        deadline = Deadline(self._settings.timeout_s)
        self.ensure_open()
        gate = self._gate.get()
        if not gate.begin():
            self.ensure_open()  # raises: the storage was closed in the meantime
        try:
            with self._translate_errors():
                yield self._mount.get(), deadline
        finally:
            if gate.end():
                self._mount.close()

    def _scan(self, space: KeySpace) -> Iterator[PageInfo]:
        pages = self._mount.get().index.pages(self._files_of(space))
        while True:
            with self._call():
                page_hash = next(pages, None)
            if page_hash is None:
                return
            yield PageInfo(page_hash, space.stored_nbytes)

    def _faults_of(self, space: KeySpace, hashes: Sequence[str]) -> Iterator[PageFault]:
        files = self._files_of(space)
        with (
            self._call() as (mount, deadline),
            mount.index.view(files, deadline) as view,
        ):
            places = view.find(hashes)
            verdicts = files.check(places, deadline) if places else {}
            if native.LATE in verdicts.values():
                deadline.check(f"hf3fs: looking at {counted(len(hashes), 'page')}")
            wrong = {one: places[one] for one, verdict in verdicts.items() if verdict != native.HIT}
            still = view.still(wrong, deadline) if wrong else frozenset[str]()
        for page_hash in wrong:
            if page_hash not in still:
                continue
            verdict = verdicts[page_hash]
            if verdict < 0 and verdict != -errno.ENOENT:
                detail = f"its slot cannot be read: {os.strerror(-verdict)}"
                yield PageFault(page_hash, "unreadable", detail)
            else:
                yield PageFault(page_hash, "corrupt", "its slot does not hold its marks")

    @contextmanager
    def _translate_errors(self) -> Generator[None, None, None]:
        try:
            yield
        except HiCacheError:
            raise
        except OSError as error:
            raise StorageUnavailable(
                f"hf3fs: {self._layout.root} cannot be used: {error.strerror}"
            ) from error


class Hf3fsReader(SlotReader[ReadMount[IndexReader]]):
    """A read-only storage of pages in slots: no writer, no leases, no locks and no access times."""

    def __init__(self, settings: Hf3fsSettings, layout: Layout) -> None:
        super().__init__(settings, layout)
        self._mount = ForkLocal(self._open_root, close=lambda mount: mount.close())

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        settings = Hf3fsSettings.parse("hf3fs", config)
        return cls(settings, layout_at(settings))

    def _open_root(self) -> ReadMount[IndexReader]:
        settings, counters = self._settings, Counters()
        with self._translate_errors():
            url = settings.index.get_secret_value()
            index = open_index_reader(url, self._layout, settings.timeout_s)
            figures = index.figures(time.time_ns(), Deadline(settings.timeout_s))
            index.used_nbytes = figures.used_nbytes
        transfers = Transfers(counters, None, direct=self._direct, local=self._local)
        return ReadMount(index, transfers, counters)


def layout_at(settings: Hf3fsSettings) -> Layout:
    """Return the layout of the root that a config names, and check that the config names its index."""
    layout = Layout.at(settings.path)
    layout.require_index(redis=settings.index.get_secret_value() != SQLITE)
    return layout


def _claims(widest: Capabilities, settings: Hf3fsSettings, *, direct: bool) -> Capabilities:
    """Return what a storage with these settings claims. `direct`: its files take O_DIRECT."""
    evicts = settings.capacity_nbytes is not None
    return replace(
        widest,
        retention=min(widest.retention, Retention.UNTIL_PRESSURE if evicts else widest.retention),
        alignment=BLOCK_NBYTES if direct else 1,
        parallelism=settings.parallelism,
    )


def _takes_direct(layout: Layout) -> bool:
    """Return True if files of this root can be read and written around the page cache.

    An unnamed file is opened, which changes nothing. If this user may not do that here, for example on a
    read-only mount, a manifest is read instead.
    """
    try:
        os.close(os.open(layout.spaces, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | DIRECT, 0o600))
    except OSError as error:
        return error.errno in _NO_RIGHT_HERE and takes_direct_reads(layout.a_manifest())
    return bool(DIRECT)


def _slot_files(layout: Layout, space: KeySpace) -> SlotFiles:
    return SlotFiles(layout, Geometry(space))
