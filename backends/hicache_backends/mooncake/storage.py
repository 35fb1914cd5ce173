"""`mooncake`: pages as objects of a Mooncake Store, moved by its own client without a copy.

The client library's dangers are kept in `_client`, the memory that it may touch in `_transfers`.
"""

from __future__ import annotations

import json
import os
import re
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from hicache_backends.mooncake import driver, listing
from hicache_backends.mooncake.client import FORKED, MasterFailed, gone, sound
from hicache_backends.mooncake.client_cache import CLIENT_CACHE
from hicache_backends.mooncake.leases import tries
from hicache_backends.mooncake.settings import MooncakeSettings, settings_of
from hicache_backends.mooncake.transfers import Transfers
from hicache_backends.mooncake.unfinished import not_there, unfinished
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import HiCacheError, StorageClosed, StorageTimeout
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
    from collections.abc import Iterator, Mapping, Sequence

    from hicache_storage.page import HostBuffer

__all__ = ["MooncakeSettings", "MooncakeStorage"]

_store = driver.load()
_MANIFEST = "manifest"
_SPACE = re.compile(r"[0-9a-f]{32}")
_PAGE = re.compile(r"[0-9a-f]{32,128}")
_REMOVED_AT_ONCE = 4096


class _State(NamedTuple):
    """What is known of the keys of a set; of others, that they are absent."""

    there: set[str]
    """They hold a page."""
    wrong: set[str]
    """They hold something of another size, as was seen."""
    unfinished: set[str]
    """Somebody is setting them, or died setting them."""


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
        self._client = CLIENT_CACHE.take(_store, settings)
        self._buffers: list[int] = []
        try:
            self._transfers = Transfers(self._client, register_staging=settings.protocol != "tcp")
            self._replicas = _replicas(settings)
            if settings.master is None or settings.tenant_id != "default":
                self.narrow(enumerable=False)
        except BaseException:
            CLIENT_CACHE.give_back(settings, self._client)
            raise

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(settings_of(config))

    def ensure_open(self) -> None:
        if self.is_forked_copy:
            raise StorageClosed(FORKED)
        super().ensure_open()

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self._client.ask(lambda native: self._put_manifest(native, space), self._deadline())

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        keys = self._keys(space, hashes)
        if not keys:
            return []
        codes = self._client.ask(
            lambda native: _presence(native.batch_is_exist(keys)), self._deadline()
        )
        return [code == 1 for code in codes]

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        if not hashes:
            return []
        return self._transfers.read(self._keys(space, hashes), pages, self._deadline())

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        if not hashes:
            return []
        deadline = self._deadline()
        keys = self._keys(space, hashes)
        state = self._client.ask(
            lambda native: self._looked_at(native, space, keys, deadline), deadline
        )
        self._counters.add("wrong_size", len(state.wrong))
        kept = self._removed(state.wrong, deadline) if state.wrong else set[str]()
        refused = state.unfinished | kept
        results = [key not in refused for key in keys]
        missing = [
            place for place, key in enumerate(keys) if key not in state.there and key not in refused
        ]
        stored = self._transfers.write(
            [keys[place] for place in missing],
            [pages[place] for place in missing],
            self._replicas,
            deadline,
        )
        # A put of these is what lets the master discard them, when it is time.
        begun = sorted(state.unfinished)
        lost = (
            self._client.ask(lambda native: not_there(native, begun), deadline)
            if begun
            else set[str]()
        )
        for place, ok in zip(missing, stored, strict=True):
            results[place] = ok and keys[place] not in lost
        self._counters.add("refused_pages", results.count(False))
        return results

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        keys = self._keys(space, hashes)
        held = self._removed(set(keys), self._deadline()) if keys else set[str]()
        self._counters.add("leased_pages", len(held))
        return [key not in held for key in keys]

    def spaces(self) -> Iterator[KeySpace]:
        if not self.capabilities.enumerable:
            return super().spaces()
        self.ensure_open()
        deadline = self._deadline()
        found: list[KeySpace] = []
        for key in listing.keys(self._client, self._settings, self._prefix, deadline):
            space_id, _, name = key.removeprefix(self._prefix).partition("/")
            if name == _MANIFEST and _SPACE.fullmatch(space_id):
                space = self._manifest(key, deadline)
                if space is not None and space.id == space_id:
                    found.append(space)
        return iter(found)

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        if not self.capabilities.enumerable:
            return super().scan(space)
        self.ensure_open()
        deadline = self._deadline()
        root = self._root(space)
        keys = self._page_keys(space, deadline)
        sizes = self._client.ask(lambda native: _sizes(native, keys), deadline)
        return iter(
            [
                PageInfo(key.removeprefix(root), space.stored_nbytes)
                for key in keys
                if _may_be_whole(sizes.get(key), space.stored_nbytes)
            ]
        )

    def clear(self, space: KeySpace) -> int:
        if not self.capabilities.enumerable:
            return super().clear(space)
        self.ensure_open()
        deadline = self._deadline()
        keys = set(self._page_keys(space, deadline))
        held = self._removed(keys, deadline)
        if held:
            raise StorageTimeout(
                f"mooncake: {len(held)} pages are leased to readers for longer than"
                f" {self._settings.timeout_s:g} s; {len(keys) - len(held)} were cleared: call it again"
            )
        return len(keys)

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
        try:
            for start in list(self._buffers):
                self._unregister(start)
        except HiCacheError:  # too many calls are overdue: the client's end gives the memory back
            self._buffers.clear()
        finally:
            CLIENT_CACHE.give_back(self._settings, self._client)

    # --- parts ---------------------------------------------------------------------------------------

    def _deadline(self) -> Deadline:
        """The deadline of a call that begins now."""
        return Deadline(self._settings.timeout_s)

    def _removed(self, keys: set[str], deadline: Deadline) -> set[str]:
        """Remove objects, once nobody reads them any more; return those that are leased to the end.

        The master could be forced. It would give a page's memory to another one in the middle of a read,
        and the reader would have a hit with the other's bytes.
        """
        for _ in tries(deadline):
            self.ensure_open()
            kept: set[str] = set()
            for asked in _batches(sorted(keys)):
                codes = self._client.ask(partial(_remove, asked, deadline), deadline)
                kept.update(key for key, code in zip(asked, codes, strict=True) if not gone(code))
            keys = kept
            if not keys:
                break
        return keys

    def _page_keys(self, space: KeySpace, deadline: Deadline) -> list[str]:
        """Listed over HTTP, which leases nothing."""
        root = self._root(space)
        listed = listing.keys(self._client, self._settings, root, deadline)
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

    def _looked_at(
        self, native: Any, space: KeySpace, keys: list[str], deadline: Deadline
    ) -> _State:
        """Return what is known of the keys, before any page is put.

        A put over an object that is there says that it stored, and keeps the old one.
        """
        codes = _presence(native.batch_is_exist([*keys, self._root(space) + _MANIFEST]))
        if codes[-1] != 1:  # evicted, or the master has forgotten everything
            deadline.check("mooncake: a set")
            self._put_manifest(native, space)
        present = [key for key, code in zip(keys, codes, strict=False) if code == 1]
        sizes = _sizes(native, present)
        there = {key for key in sizes if _may_be_whole(sizes[key], space.stored_nbytes)}
        absent = [key for key in keys if key not in sizes]
        return _State(there, sizes.keys() - there, unfinished(native, absent))

    def _put_manifest(self, native: Any, space: KeySpace) -> None:
        text = json.dumps(space.manifest(), sort_keys=True).encode()
        sound([native.put(self._root(space) + _MANIFEST, text, self._replicas)])

    def _manifest(self, key: str, deadline: Deadline) -> KeySpace | None:
        data = self._client.ask(partial(_read, key), deadline)
        try:
            return KeySpace.from_manifest(json.loads(data))
        except (ValueError, RecursionError):
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


def _remove(keys: Sequence[str], deadline: Deadline, native: Any) -> list[int]:
    deadline.check("mooncake: a removal")  # whoever asked for it may have set the pages again
    return sound(native.batch_remove(list(keys), False))


def _read(key: str, native: Any) -> bytes:
    """Return a small object, or nothing where it is absent. An unanswered `get` says nothing too."""
    data: bytes = native.get(key)
    if not data and _presence(native.batch_is_exist([key])) == [1]:
        raise MasterFailed
    return data


def _batches(keys: list[str]) -> list[list[str]]:
    """Pieces of a length that the master answers soon: what was removed stays so if time runs out."""
    return [
        keys[start : start + _REMOVED_AT_ONCE] for start in range(0, len(keys), _REMOVED_AT_ONCE)
    ]


def _presence(codes: list[int]) -> list[int]:
    """Raises MasterFailed where the answer is neither yes nor no."""
    if any(code not in (0, 1) for code in codes):
        raise MasterFailed
    return codes


def _sizes(native: Any, keys: list[str]) -> dict[str, set[int]]:
    """Return the sizes of the complete replicas of each object that is there, as far as they tell.

    Raises:
        MasterFailed: One is there and was not described. The client leaves out what nobody answered.
    """
    if not keys:
        return {}
    found = native.batch_get_replica_desc(keys)
    left_out = [key for key in keys if not found.get(key)]
    if left_out and 1 in _presence(native.batch_is_exist(left_out)):
        raise MasterFailed
    return {
        key: {nbytes for replica in replicas if (nbytes := _nbytes(replica)) is not None}
        for key, replicas in found.items()
        if replicas
    }


def _may_be_whole(sizes: set[int] | None, nbytes: int) -> bool:
    """Return False for an object that is absent or was seen to have another size than `nbytes`.

    Replicas on the disks of clients do not tell: a read of one looks at its size.
    """
    return sizes is not None and (not sizes or nbytes in sizes)


def _nbytes(replica: Any) -> int | None:
    if replica.is_memory_replica():
        size: int = replica.get_memory_descriptor().buffer_descriptor.size
        return size
    if replica.is_disk_replica():
        stored: int = replica.get_disk_descriptor().object_size
        return stored
    return None
