"""`mooncake`: pages as objects of a Mooncake Store, moved by its own client without a copy.

The client library's dangers are kept in `_client`, the memory that it may touch in `_transfers`.
"""

from __future__ import annotations

import json
import os
import re
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from hicache_backends.mooncake import _driver, _listing
from hicache_backends.mooncake._client import MasterFailed, gone, sound
from hicache_backends.mooncake._leases import tries
from hicache_backends.mooncake._settings import MooncakeSettings, settings_of
from hicache_backends.mooncake._shared import SHELF
from hicache_backends.mooncake._transfers import Transfers
from hicache_backends.mooncake._unfinished import not_there, unfinished
from hicache_storage.counters import Counters
from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.storage import (
    Capabilities,
    Durability,
    HiCacheStorage,
    PageInfo,
    Retention,
    StorageStats,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hicache_storage.page import HostBuffer

__all__ = ["MooncakeSettings", "MooncakeStorage"]

T = TypeVar("T")

_store = _driver.load()
_MANIFEST = "manifest"
_SPACE = re.compile(r"[0-9a-f]{32}")
_PAGE = re.compile(r"[0-9a-f]{32,128}")
_REGEX_CHARACTERS = re.compile(r"([\\^$.|?*+()\[\]{}])")


class MooncakeStorage(HiCacheStorage):
    """Pages in the memory of a Mooncake cluster. They die with the process whose segment holds them."""

    capabilities = Capabilities(
        retention=Retention.BEST_EFFORT,
        durability=Durability.PROCESS,
        shared=True,
        enumerable=True,
        overwrites=False,
        parallelism=2,
    )

    def __init__(self, settings: MooncakeSettings) -> None:
        self._settings = settings
        self._prefix = f"{settings.extra_backend_tag}/" if settings.extra_backend_tag else ""
        self._counters = Counters()
        self._lock = threading.Lock()
        self._client = SHELF.take(_store, settings)
        self._transfers = Transfers(
            self._client, settings.timeout_s, register_staging=settings.protocol != "tcp"
        )
        self._replicas = _replicas(settings)
        self._buffers: list[int] = []
        if settings.master is None or settings.tenant_id != "default":
            self.narrow(enumerable=False)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(settings_of(config))

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self._ask(lambda native: self._put_manifest(native, space))

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        keys = self._keys(space, hashes)
        if not keys:
            return []
        codes = self._ask(lambda native: _presence(native.batch_is_exist(keys)))
        return [code == 1 for code in codes]

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        return self._transfers.read(self._keys(space, hashes), pages) if hashes else []

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        if not hashes:
            return []
        keys = self._keys(space, hashes)
        there, taken = self._ask(lambda native: self._made_room(native, space, keys))
        results = [key not in taken for key in keys]
        missing = [place for place, key in enumerate(keys) if key not in there and key not in taken]
        stored = self._transfers.write(
            [keys[place] for place in missing],
            [pages[place] for place in missing],
            self._replicas,
        )
        begun = sorted(
            taken
        )  # a put of these is what lets the master discard them, when it is time
        lost = self._ask(lambda native: not_there(native, begun)) if begun else set[str]()
        for place, ok in zip(missing, stored, strict=True):
            results[place] = ok and keys[place] not in lost
        self._counters.add("refused_pages", results.count(False))
        return results

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        keys = self._keys(space, hashes)
        held = self._removed(set(keys)) if keys else set[str]()
        self._counters.add("leased_pages", len(held))
        return [key not in held for key in keys]

    def spaces(self) -> Iterator[KeySpace]:
        if not self.capabilities.enumerable:
            return super().spaces()
        self.ensure_open()
        found: list[KeySpace] = []
        for key in _listing.keys(self._settings, self._prefix):
            space_id, _, name = key.removeprefix(self._prefix).partition("/")
            if name == _MANIFEST and _SPACE.fullmatch(space_id):
                space = self._manifest(key)
                if space is not None and space.id == space_id:
                    found.append(space)
        return iter(found)

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        if not self.capabilities.enumerable:
            return super().scan(space)
        self.ensure_open()
        root = self._root(space)
        keys = self._page_keys(space)
        whole = self._ask(lambda native: _of_size(native, keys, space.stored_nbytes))
        return iter(
            [PageInfo(key.removeprefix(root), space.stored_nbytes) for key in keys if key in whole]
        )

    def clear(self, space: KeySpace) -> int:
        if not self.capabilities.enumerable:
            return super().clear(space)
        self.ensure_open()
        root = self._root(space)
        pattern = _REGEX_CHARACTERS.sub(r"\\\1", root)
        (removed,) = self._ask(
            lambda native: sound([native.remove_by_regex(f"^{pattern}[0-9a-f]+$", False)])
        )
        if removed < 0:
            raise StorageUnavailable(
                f"mooncake: the master refused to clear a key space: {removed}"
            )
        leased = set(self._page_keys(space))
        held = self._removed(leased) if leased else leased
        if held:
            raise StorageTimeout(
                f"mooncake: {len(held)} pages are leased to readers for longer than"
                f" {self._settings.timeout_s:g} s; {removed + len(leased) - len(held)} were cleared:"
                " call it again"
            )
        return removed + len(leased)

    def register_buffer(self, buffer: HostBuffer) -> None:
        self.ensure_open()
        for start, nbytes in Page(buffer).addresses:
            if self._client.register(start, nbytes):
                with self._lock:
                    self._buffers.append(start)
            else:  # its pages are copied
                self._counters.add("buffers_not_registered")

    def unregister_buffer(self, buffer: HostBuffer) -> None:
        self.ensure_open()
        for start, _ in Page(buffer).addresses:
            self._unregister(start)

    def stats(self) -> StorageStats:
        self.ensure_open()
        return StorageStats(counters=self._counters.snapshot())

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        for start in list(self._buffers):
            self._unregister(start)
        SHELF.give_back(self._settings, self._client)

    # --- parts ---------------------------------------------------------------------------------------

    def _ask(self, task: Callable[[Any], T], timeout_s: float | None = None) -> T:
        return self._client.ask(task, timeout_s or self._settings.timeout_s)

    def _removed(self, keys: set[str]) -> set[str]:
        """Remove objects, once nobody reads them any more; those that are still leased in the end.

        The master could be forced. It would give a page's memory to another one in the middle of a read,
        and the reader would have a hit with the other's bytes.
        """
        for left_s in tries(self._settings.timeout_s):
            self.ensure_open()
            asked = sorted(keys)
            codes = self._ask(partial(_remove, asked), left_s)
            keys = {key for key, code in zip(asked, codes, strict=True) if not gone(code)}
            if not keys:
                break
        return keys

    def _page_keys(self, space: KeySpace) -> list[str]:
        """Listed over HTTP, which leases nothing."""
        root = self._root(space)
        listed = _listing.keys(self._settings, root)
        return [key for key in listed if _PAGE.fullmatch(key.removeprefix(root))]

    def _root(self, space: KeySpace) -> str:
        return f"{self._prefix}{space.id}/"

    def _keys(self, space: KeySpace, hashes: Sequence[str]) -> list[str]:
        root = self._root(space)
        return [root + page_hash for page_hash in hashes]

    def _unregister(self, start: int) -> None:
        with self._lock:
            if start not in self._buffers:
                return
            self._buffers.remove(start)
        if self._client.pid == os.getpid():
            self._client.unregister(start)

    def _made_room(
        self, native: Any, space: KeySpace, keys: list[str]
    ) -> tuple[set[str], set[str]]:
        """The keys that hold a page already, and those that somebody is setting, or died setting.

        What has their name and another size is removed.

        A put over an object that is there says that it stored, and keeps the old one.
        """
        codes = _presence(native.batch_is_exist([*keys, self._root(space) + _MANIFEST]))
        if codes[-1] != 1:  # evicted, or the master has forgotten everything
            self._put_manifest(native, space)
        present = [key for key, code in zip(keys, codes, strict=False) if code == 1]
        whole = _of_size(native, present, space.stored_nbytes)
        wrong = sorted(set(present) - whole)
        if wrong:  # by force: no reader has a hit of another size, so leases protect nobody
            self._counters.add("wrong_size", len(wrong))
            sound(native.batch_remove(wrong, True))
        absent = [key for key, code in zip(keys, codes, strict=False) if code == 0]
        return whole, unfinished(native, absent)

    def _put_manifest(self, native: Any, space: KeySpace) -> None:
        text = json.dumps(space.manifest(), sort_keys=True).encode()
        sound([native.put(self._root(space) + _MANIFEST, text, self._replicas)])

    def _manifest(self, key: str) -> KeySpace | None:
        data: bytes = self._ask(lambda native: native.get(key))
        try:
            return KeySpace.from_manifest(json.loads(data))
        except ValueError:
            return None


def _replicas(settings: MooncakeSettings) -> Any:
    """How many copies a new page has, and where."""
    wanted = _store.ReplicateConfig()
    wanted.replica_num = settings.replica_num
    if settings.preferred_segment:
        wanted.preferred_segments = [settings.preferred_segment]
    if settings.soft_pin_ttl_ms is not None:
        wanted.soft_pin_ttl_ms = settings.soft_pin_ttl_ms
    return wanted


def _remove(keys: list[str], native: Any) -> list[int]:
    return sound(native.batch_remove(keys, False))


def _presence(codes: list[int]) -> list[int]:
    """Raises MasterFailed where the answer is neither yes nor no."""
    if any(code not in (0, 1) for code in codes):
        raise MasterFailed
    return codes


def _of_size(native: Any, keys: list[str], nbytes: int) -> set[str]:
    """The keys whose object is complete and has `nbytes` bytes."""
    if not keys:
        return set()
    return {
        key
        for key, replicas in native.batch_get_replica_desc(keys).items()
        if any(_nbytes(replica) == nbytes for replica in replicas)
    }


def _nbytes(replica: Any) -> int | None:
    if replica.is_memory_replica():
        size: int = replica.get_memory_descriptor().buffer_descriptor.size
        return size
    if replica.is_disk_replica():
        stored: int = replica.get_disk_descriptor().object_size
        return stored
    return None
