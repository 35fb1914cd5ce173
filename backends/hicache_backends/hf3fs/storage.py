"""`hf3fs` as a HiCacheStorage: pages in the slots of large files, found through an index."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Self

from hicache_backends.hf3fs.layout import Geometry, Layout
from hicache_backends.hf3fs.mount import Mount
from hicache_backends.hf3fs.reader import Hf3fsReader, SlotReader, layout_at
from hicache_backends.hf3fs.settings import Hf3fsSettings
from hicache_storage.backend_support.capacity import page_over_capacity
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.backend_support.manifest import SPACE_ID
from hicache_storage.errors import ConfigError
from hicache_storage.settings import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.storage import HiCacheStorage

logger = logging.getLogger(__name__)


class Hf3fsStorage(SlotReader[Mount]):
    """A storage of pages in slots.

    Threads, processes, ranks and models share the pages, and the pages outlive all of these.
    """

    def __init__(self, settings: Hf3fsSettings) -> None:
        layout_at(settings)
        super().__init__(settings, Layout.create(settings.path))
        self._mount = ForkLocal(self._open_root, close=Mount.close)
        self._layout.warn_of_misuse(settings.capacity_nbytes)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(Hf3fsSettings.parse("hf3fs", config))

    @classmethod
    def open_read_only(cls, config: Mapping[str, Any]) -> HiCacheStorage:
        """Open an `Hf3fsReader`.

        If a subclass calls this, open the subclass without its limits, because it may read
        differently.
        """
        if cls is Hf3fsStorage:
            return Hf3fsReader.from_config(config)
        storage = cls.from_config(
            {name: config[name] for name in config.keys() - {"capacity_nbytes"}}
        )
        storage.declare(Hf3fsSettings.parse("hf3fs", config))
        return storage

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        with self._call():
            self._require_capacity_for(space)
            self._layout.make_space(space)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        with self._call() as (mount, deadline):
            return mount.save(self._files_of(space), hashes, pages, deadline)

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        with self._call() as (mount, deadline):
            mount.delete(self._files_of(space), hashes, deadline)
        return [True] * len(hashes)

    def clear(self, space: KeySpace) -> int:
        with self._call() as (mount, deadline):
            return mount.clear(self._files_of(space), deadline)

    def remove_space(self, space_id: str) -> int:
        self.ensure_open()
        if not SPACE_ID.fullmatch(space_id):
            return 0
        self._layout.refuse_link(self._layout.space_dir(space_id))
        with self._call() as (mount, deadline):
            return mount.remove_space(space_id, deadline)

    # --- parts ---------------------------------------------------------------------------------------

    def _require_capacity_for(self, space: KeySpace) -> None:
        capacity_nbytes, slot_nbytes = self._settings.capacity_nbytes, Geometry(space).slot_nbytes
        if capacity_nbytes is not None and capacity_nbytes < slot_nbytes:
            raise ConfigError(page_over_capacity("hf3fs", space, slot_nbytes, capacity_nbytes))

    def _open_root(self) -> Mount:
        layout, limits = self._layout, self._limits
        options = {"direct": self._direct, "local": self._local}
        with self._translate_errors():
            mount = Mount(layout, limits, Counters(), self._settings, **options)
        self._warn_of_large_eviction(mount.index.used_nbytes)
        return mount

    def _warn_of_large_eviction(self, used_nbytes: int) -> None:
        """Warn if the first sets will evict more than half of the pages."""
        capacity_nbytes = self._limits.capacity_nbytes
        to_evict_nbytes = self._limits.to_evict(used_nbytes, 0)
        if capacity_nbytes is not None and to_evict_nbytes > used_nbytes / 2:
            logger.warning(
                "hf3fs: the pages in %s take %s, but capacity_nbytes is %s: sets will evict %s",
                self._layout.root,
                format_nbytes(used_nbytes),
                format_nbytes(capacity_nbytes),
                format_nbytes(to_evict_nbytes),
            )
