"""`hf3fs`: pages in fixed slots of large preallocated files on a shared mount, as 3FS is used.

What a slot holds is in `_slot`, which slot holds what in `_index`, how bytes move in `_transfer`.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from pydantic import model_validator

from hicache_backends.hf3fs.call_gate import CallGate
from hicache_backends.hf3fs.index.base import Limits
from hicache_backends.hf3fs.layout import Layout
from hicache_backends.hf3fs.mount import SQLITE, Mount
from hicache_backends.hf3fs.slot_files import DIRECT, SlotFiles
from hicache_backends.hf3fs.slots import BLOCK_NBYTES, Geometry
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.filesystem import is_local
from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.errors import ConfigError, HiCacheError, StorageUnavailable
from hicache_storage.settings import ByteSize, Field, PositiveSeconds, SecretStr, Settings
from hicache_storage.storage import (
    Capabilities,
    Durability,
    HiCacheStorage,
    PageInfo,
    Retention,
    StorageStats,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

__all__ = ["Hf3fsSettings", "Hf3fsStorage"]

logger = logging.getLogger(__name__)

_PARALLELISM = 4
_INDEX = re.compile(r"sqlite\Z|(redis|rediss|unix)://")


class Hf3fsSettings(Settings):
    """The config of `hf3fs`."""

    path: str = Field(min_length=1)
    """The directory on the mount; made if it is missing. Everything that shares it shares its pages."""
    index: SecretStr = SecretStr(SQLITE)
    """Where it is kept which page is in which slot: "sqlite", a file under `path`, for one host; or the
    URL of a Redis server, for any number."""
    capacity_nbytes: ByteSize | None = Field(default=None, gt=0)
    """What the slots in use of all key spaces together may take. None: no limit."""
    high_watermark: float = Field(default=0.95, gt=0, le=1)
    """The share of the capacity at which eviction begins, least recently used pages first."""
    low_watermark: float = Field(default=0.9, gt=0, le=1)
    """The share at which it ends."""
    direct: bool | None = None
    """Read and write around the page cache, where pages, memory and file system allow it. None: on every
    file system that is not known to be this machine's alone."""
    usrbio: bool | None = None
    """Go around FUSE by 3FS's own client. None: where that is installed and `path` is on 3FS."""
    parallelism: int = Field(default=_PARALLELISM, ge=1)
    """Concurrent calls that the page store makes in each direction."""
    touch_interval_s: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """How long it may take until the index hears of what was read."""
    timeout_s: PositiveSeconds = 30.0
    """Pages that a call has not begun by then are misses, or refused; so long it waits for the index."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.low_watermark > self.high_watermark:
            raise ValueError("low_watermark: must not be above high_watermark")
        if not _INDEX.match(self.index.get_secret_value()):
            raise ValueError('index: must be "sqlite" or the URL of a Redis server')
        return self


class Hf3fsStorage(HiCacheStorage):
    """Pages in slots. Shared by threads, processes, ranks and models; survives all of them."""

    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.CRASH,
        shared=True,
        enumerable=True,
        overwrites=False,
        alignment=BLOCK_NBYTES,
        parallelism=_PARALLELISM,
    )
    usable_after_fork = True

    def __init__(self, settings: Hf3fsSettings) -> None:
        self._settings = settings
        self._calls = ForkLocal(CallGate, close=lambda _: None)
        self._files: dict[KeySpace, SlotFiles] = {}
        self._layout = Layout(_made_root(settings.path))
        self._limits = Limits(
            capacity_nbytes=settings.capacity_nbytes,
            high_watermark=settings.high_watermark,
            low_watermark=settings.low_watermark,
        )
        self._local = is_local(self._layout.root)
        wanted = settings.direct
        if wanted is None:
            wanted = not self._local
        self._direct = wanted and _takes_direct(self._layout)
        self._mounts = ForkLocal(self._mount_made, close=Mount.close)
        self.narrow(alignment=BLOCK_NBYTES if self._direct else 1, parallelism=settings.parallelism)
        if settings.capacity_nbytes is not None:
            self.narrow(retention=Retention.UNTIL_PRESSURE)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(Hf3fsSettings.parse("hf3fs", config))

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
            return iter(list(self._layout.key_spaces()))

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        return self._scan(space)

    def clear(self, space: KeySpace) -> int:
        with self._call() as (mount, deadline):
            return mount.clear(self._files_of(space), deadline)

    def stats(self) -> StorageStats:
        self.ensure_open()
        index = self._mounts.get().index
        counters = self._counters.snapshot()
        if index.evicted:
            counters["evicted"] = index.evicted
        return StorageStats(
            nbytes=index.used_nbytes,
            capacity_nbytes=self._settings.capacity_nbytes,
            counters=counters,
        )

    def close(self) -> None:
        super().close()
        if self._calls.get().close():
            self._mounts.close()

    # --- parts ---------------------------------------------------------------------------------------

    @contextmanager
    def _call(self) -> Generator[tuple[Mount, Deadline], None, None]:
        """Make one call: what it uses stays until it ends; the last one closes up after a `close`."""
        deadline = Deadline(self._settings.timeout_s)
        self.ensure_open()
        calls = self._calls.get()
        if not calls.begin():
            self.ensure_open()  # closed meanwhile: it says so
        try:
            yield self._mounts.get(), deadline
        except OSError as error:
            if isinstance(error, HiCacheError):
                raise
            raise StorageUnavailable(
                f"hf3fs: {self._layout.root} cannot be used: {error.strerror}"
            ) from error
        finally:
            if calls.end():
                self._mounts.close()

    def _scan(self, space: KeySpace) -> Iterator[PageInfo]:
        pages = self._mounts.get().index.pages(self._files_of(space))
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

    def _mount_made(self) -> Mount:
        self._counters = Counters()
        try:
            mount = Mount(
                self._layout,
                self._limits,
                self._counters,
                index=self._settings.index.get_secret_value(),
                usrbio=self._settings.usrbio,
                direct=self._direct,
                local=self._local,
                timeout_s=self._settings.timeout_s,
                touch_interval_s=self._settings.touch_interval_s,
            )
        except OSError as error:
            if isinstance(error, HiCacheError):
                raise
            raise StorageUnavailable(
                f"hf3fs: {self._layout.root} cannot be used: {error.strerror}"
            ) from error
        self._warn_of_eviction(mount.index.used_nbytes)
        return mount

    def _warn_of_eviction(self, used_nbytes: int) -> None:
        """Say so where the first sets will evict more than half of what is there."""
        to_evict_nbytes = self._limits.to_evict(used_nbytes, 0)
        if to_evict_nbytes > used_nbytes / 2:
            logger.warning(
                "hf3fs: capacity_nbytes: %d bytes are less than half of the %d bytes that are in use"
                " under %s: sets will evict %d bytes",
                *(self._limits.capacity_nbytes, used_nbytes, self._layout.root, to_evict_nbytes),
            )


def _made_root(path: str) -> str:
    """The directory at `path`, absolute, made where it was missing."""
    try:
        root = os.path.abspath(os.path.expanduser(path))
        Layout(root).make()
    except ValueError as error:
        raise ConfigError(f"hf3fs: path: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"hf3fs: path: {path} is no directory and cannot be made one ({error.strerror}):"
            " mount the file system, or name another"
        ) from error
    return root


def _takes_direct(layout: Layout) -> bool:
    """Whether files of this root can be read and written around the page cache."""
    if not DIRECT:
        return False
    try:
        descriptor = os.open(layout.spaces, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | DIRECT, 0o600)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, BLOCK_NBYTES) as block:
            return os.pwrite(descriptor, block, 0) == BLOCK_NBYTES
    except OSError:
        return False
    finally:
        os.close(descriptor)
