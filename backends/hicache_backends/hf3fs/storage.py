"""`hf3fs` as a HiCacheStorage: pages in the slots of large files, found through an index."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from hicache_backends.hf3fs.index.base import Limits
from hicache_backends.hf3fs.layout import BLOCK_NBYTES, Geometry, Layout
from hicache_backends.hf3fs.mount import Mount
from hicache_backends.hf3fs.settings import DEFAULT_PARALLELISM, Hf3fsSettings
from hicache_backends.hf3fs.slots import SlotFiles
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.filesystem import is_local
from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.backend_support.shared_resource import CallGate
from hicache_storage.backend_support.vectored_io import DIRECT, takes_direct_writes
from hicache_storage.errors import ConfigError, HiCacheError, StorageUnavailable
from hicache_storage.settings import format_nbytes
from hicache_storage.storage import (
    Capabilities,
    Durability,
    HiCacheStorage,
    PageInfo,
    PageTimes,
    Retention,
    StorageStats,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

logger = logging.getLogger(__name__)


class Hf3fsStorage(HiCacheStorage):
    """Pages in slots. Shared by threads, processes, ranks and models; survives all of them."""

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

    def __init__(self, settings: Hf3fsSettings) -> None:
        self._settings = settings
        self._gate = ForkLocal(CallGate, close=lambda _: None)
        self._files: dict[KeySpace, SlotFiles] = {}
        self._layout = Layout.create(settings.path)
        self._limits = Limits(
            capacity_nbytes=settings.capacity_nbytes,
            high_watermark=settings.high_watermark,
            low_watermark=settings.low_watermark,
        )
        self._local = is_local(self._layout.root)
        wanted = not self._local if settings.direct is None else settings.direct
        self._direct = wanted and _takes_direct(self._layout)
        self._mount = ForkLocal(self._open_root, close=Mount.close)
        self.narrow(alignment=BLOCK_NBYTES if self._direct else 1, parallelism=settings.parallelism)
        if settings.capacity_nbytes is not None:
            self.narrow(retention=Retention.UNTIL_PRESSURE)
        self._layout.warn_of_misuse(settings.capacity_nbytes)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(Hf3fsSettings.parse("hf3fs", config))

    @classmethod
    def would_create(cls, config: Mapping[str, Any]) -> str | None:
        return Layout.missing_root(Hf3fsSettings.parse("hf3fs", config).path)

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        with self._call():
            self._require_capacity_for(space)
            self._layout.make_space(space)

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

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        with self._call() as (mount, deadline):
            return mount.save(self._files_of(space), hashes, pages, deadline)

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        with self._call() as (mount, deadline):
            mount.delete(self._files_of(space), hashes, deadline)
        return [True] * len(hashes)

    def spaces(self) -> Iterator[KeySpace]:
        with self._call():
            return iter(list(self._layout.key_spaces(skip_unreadable=False)))

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        return self._scan(space)

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        """Return the access times of the index. Without a capacity they are those of the write."""
        with self._call() as (mount, deadline):
            used_ns = mount.index.used_ns(self._files_of(space), hashes, deadline)
        field = "written_at_s" if self._settings.capacity_nbytes is None else "used_at_s"
        return [
            PageTimes(**{field: used_ns[page_hash] / 1e9}) if page_hash in used_ns else PageTimes()
            for page_hash in hashes
        ]

    def clear(self, space: KeySpace) -> int:
        with self._call() as (mount, deadline):
            return mount.clear(self._files_of(space), deadline)

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

    @contextmanager
    def _call(self) -> Generator[tuple[Mount, Deadline], None, None]:
        """Lend the mount to one call. After a `close` the last call closes the mount."""
        deadline = Deadline(self._settings.timeout_s)
        self.ensure_open()
        gate = self._gate.get()
        if not gate.begin():
            self.ensure_open()  # raises: the storage was closed meanwhile
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

    def _require_capacity_for(self, space: KeySpace) -> None:
        capacity_nbytes, slot_nbytes = self._settings.capacity_nbytes, Geometry(space).slot_nbytes
        if capacity_nbytes is not None and capacity_nbytes < slot_nbytes:
            raise ConfigError(
                f"hf3fs: capacity_nbytes: {capacity_nbytes} bytes hold no page of pool {space.pool!r} of"
                f" {space.model!r}, which takes {slot_nbytes} bytes: raise it"
            )

    def _files_of(self, space: KeySpace) -> SlotFiles:
        files = self._files.get(space)
        if files is None:
            files = self._files[space] = SlotFiles(self._layout, Geometry(space))
        return files

    def _open_root(self) -> Mount:
        layout, limits = self._layout, self._limits
        options = {"direct": self._direct, "local": self._local}
        with self._translate_errors():
            mount = Mount(layout, limits, Counters(), self._settings, **options)
        self._warn_of_large_eviction(mount.index.used_nbytes)
        return mount

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

    def _warn_of_large_eviction(self, used_nbytes: int) -> None:
        """Warn when the first sets will evict more than half of the pages."""
        capacity_nbytes = self._limits.capacity_nbytes
        to_evict_nbytes = self._limits.to_evict(used_nbytes, 0)
        if capacity_nbytes is not None and to_evict_nbytes > used_nbytes / 2:
            logger.warning(
                "hf3fs: capacity_nbytes: %s is less than half of the %s that are in use under %s:"
                " sets will evict %s",
                format_nbytes(capacity_nbytes),
                format_nbytes(used_nbytes),
                self._layout.root,
                format_nbytes(to_evict_nbytes),
            )


def _takes_direct(layout: Layout) -> bool:
    """Return True when files of this root can be read and written around the page cache."""
    try:
        fd = os.open(layout.spaces, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | DIRECT, 0o600)
    except OSError:
        return False
    try:
        return takes_direct_writes(fd)
    finally:
        os.close(fd)
