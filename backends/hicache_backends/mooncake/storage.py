"""`mooncake` as a HiCacheStorage: pages as objects in a Mooncake Store, moved by its own client."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from hicache_backends.mooncake import driver
from hicache_backends.mooncake.client import FORKED, checked
from hicache_backends.mooncake.client_cache import CLIENT_CACHE
from hicache_backends.mooncake.layout import Layout
from hicache_backends.mooncake.master import list_keys
from hicache_backends.mooncake.objects import (
    KeyStates,
    key_states,
    may_be_whole,
    object_sizes,
    presence,
    read_small,
    remove_unleased,
)
from hicache_backends.mooncake.settings import MooncakeSettings, parse_settings
from hicache_backends.mooncake.transfers import Transfers
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.manifest import (
    SPACE_ID,
    decode_manifest,
    encode_manifest,
    unreadable_space,
)
from hicache_storage.errors import HiCacheError, StorageClosed, StorageTimeout
from hicache_storage.page import Page
from hicache_storage.settings import counted
from hicache_storage.storage import (
    Capabilities,
    Durability,
    HiCacheStorage,
    PageFault,
    PageInfo,
    Retention,
    StorageStats,
    UnreadableSpace,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import HostBuffer

_native_module = driver.load()


class MooncakeStorage(HiCacheStorage):
    """A storage of pages in the memory of a Mooncake cluster.

    A page is lost if the process that lends its memory ends.
    """

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
        self._layout = Layout(settings.extra_backend_tag)
        self._counters = Counters()
        self._lock = threading.Lock()
        deadline = Deadline(settings.timeout_s)
        self._client = CLIENT_CACHE.acquire(_native_module, settings, deadline)
        self._buffers: dict[int, int] = {}
        """The size of each registered range, by its start."""
        try:
            self._transfers = Transfers(self._client, register_staging=settings.protocol != "tcp")
            self._replicas = _replicas(settings)
            if settings.master is None or settings.tenant_id != "default":
                self.narrow(enumerable=False)
        except BaseException:
            CLIENT_CACHE.release(settings, self._client)
            raise

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(parse_settings(config))

    @classmethod
    def open_read_only(cls, config: Mapping[str, Any]) -> Self:
        """Open a storage for a program that only looks: lend the cluster neither memory nor a disk."""
        lends_nothing = {"global_segment_size": 0, "enable_ssd_offload": False}
        return cls(parse_settings(config).model_copy(update=lends_nothing))

    def ensure_open(self) -> None:
        if self.is_forked_copy:
            raise StorageClosed(FORKED)
        super().ensure_open()

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        deadline = self._begin()
        self._client.call(lambda native: self._put_manifest(native, space), deadline)

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        deadline = self._begin()
        keys = self._keys(space, hashes)
        if not keys:
            return []
        codes = self._client.call(lambda native: presence(native, keys), deadline)
        return [code == 1 for code in codes]

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        deadline = self._begin()
        if not hashes:
            return []
        return self._transfers.read(self._keys(space, hashes), pages, deadline)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        deadline = self._begin()
        if not hashes:
            return []
        keys = self._keys(space, hashes)
        states = self._client.call(
            lambda native: self._states_before_set(native, space, keys, deadline), deadline
        )
        self._counters.add("wrong_size", len(states.wrong_size))
        leased = self._remove(states.wrong_size, deadline)
        refused = states.unfinished | leased
        results = [key not in refused for key in keys]
        missing = [
            index
            for index, key in enumerate(keys)
            if key not in states.present and key not in refused
        ]
        stored = self._transfers.write(
            [keys[index] for index in missing],
            [pages[index] for index in missing],
            self._replicas,
            deadline,
        )
        for index, is_stored in zip(missing, stored, strict=True):
            results[index] = is_stored
        self._counters.add("refused_pages", results.count(False))
        return results

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        deadline = self._begin()
        keys = self._keys(space, hashes)
        leased = self._remove(set(keys), deadline)
        self._counters.add("leased_pages", len(leased))
        return [key not in leased for key in keys]

    def spaces(self) -> Iterator[KeySpace]:
        if not self.capabilities.enumerable:
            return super().spaces()
        deadline = self._begin()
        found: list[KeySpace] = []
        for key in self._list_keys(self._layout.prefix, deadline):
            space_id = self._layout.space_id(key)
            if space_id is not None:
                data = self._read_manifest(space_id, deadline)
                space = decode_manifest(data, space_id=space_id)
                if space is not None:
                    found.append(space)
        return iter(found)

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        if not self.capabilities.enumerable:
            return super().scan(space)
        deadline = self._begin()
        hashes = self._list_pages(space.id, deadline)
        keys = list(hashes)
        sizes = self._client.call(lambda native: object_sizes(native, keys), deadline)
        return iter(
            [
                PageInfo(page_hash, space.stored_nbytes)
                for key, page_hash in hashes.items()
                if may_be_whole(sizes.get(key), space.stored_nbytes)
            ]
        )

    def faults(self, space: KeySpace, hashes: Sequence[str] | None = None) -> Iterator[PageFault]:
        deadline = self._begin()
        if hashes is not None:
            named = dict(zip(self._keys(space, hashes), hashes, strict=True))
        else:
            named = self._list_pages(space.id, deadline) if self.capabilities.enumerable else {}
        keys = list(named)
        sizes = self._client.call(lambda native: object_sizes(native, keys), deadline)
        return iter(
            [
                PageFault(named[key], "wrong_size", _sizes_text(found, space))
                for key, found in sizes.items()
                if not may_be_whole(found, space.stored_nbytes)
            ]
        )

    def unreadable_spaces(self) -> Iterator[UnreadableSpace]:
        deadline = self._begin()
        if not self.capabilities.enumerable:
            return iter(())
        listed = self._list_keys(self._layout.prefix, deadline)
        found: list[UnreadableSpace] = []
        for space_id in sorted(filter(None, {self._layout.owner(key) for key in listed})):
            unreadable = unreadable_space(space_id, self._read_manifest(space_id, deadline) or None)
            if unreadable is not None:
                found.append(unreadable)
        return iter(found)

    def remove_space(self, space_id: str) -> int:
        """Remove a key space. Each step has its own deadline.

        Raises:
            StorageTimeout: Readers lease pages or the manifest for too long.
        """
        if not self.capabilities.enumerable:
            return super().remove_space(space_id)
        self.ensure_open()
        if not SPACE_ID.fullmatch(space_id):
            return 0
        removed = self._clear(space_id)
        if self._list_pages(space_id, self._begin()):  # pages were set meanwhile
            return removed
        manifest = self._read_manifest(space_id, self._begin())
        if self._remove({self._layout.manifest(space_id)}, self._begin()):
            raise StorageTimeout(
                f"mooncake: {counted(removed, 'page')} removed, but the manifest of {space_id} is"
                f" leased to readers for longer than {self._settings.timeout_s:g} s: remove it"
                " again"
            )
        space = decode_manifest(manifest, space_id=space_id)
        if space is not None and self._list_pages(space_id, self._begin()):
            self.open_space(space)
        return removed

    def clear(self, space: KeySpace) -> int:
        if not self.capabilities.enumerable:
            return super().clear(space)
        self.ensure_open()
        return self._clear(space.id)

    def _clear(self, space_id: str) -> int:
        deadline = self._begin()
        keys = set(self._list_pages(space_id, deadline))
        leased = self._remove(keys, deadline)
        if leased:
            raise StorageTimeout(
                f"mooncake: {len(keys) - len(leased):,} of {counted(len(keys), 'page')} cleared,"
                " but the others are leased to readers for longer"
                f" than {self._settings.timeout_s:g} s: clear it again"
            )
        return len(keys)

    def register_buffer(self, buffer: HostBuffer) -> None:
        self._begin()
        for start, nbytes in Page(buffer).addresses:
            with self._lock:
                if self._client.register(start, nbytes):
                    self._buffers[start] = nbytes
                    continue
            self._counters.add("buffers_not_registered")  # then pages of this buffer are copied

    def unregister_buffer(self, buffer: HostBuffer) -> None:
        self._begin()
        for start, _ in Page(buffer).addresses:
            self._unregister(start)

    def stats(self) -> StorageStats:
        self.ensure_open()
        return StorageStats(counters=self._counters.snapshot())

    def close(self) -> None:
        with self._lock:
            was_closed, self._closed = self._closed, True
        if was_closed:
            return
        try:
            for start in list(self._buffers):
                self._unregister(start)
        except HiCacheError:  # too many calls are overdue: closing the client frees the memory
            self._buffers.clear()
        finally:
            CLIENT_CACHE.release(self._settings, self._client)

    # --- parts ---------------------------------------------------------------------------------------

    def _begin(self) -> Deadline:
        """Return the deadline of a call, or of one step. If the client is retired, replace it first.

        Raises:
            StorageTimeout: Joining the cluster has used up the time.
        """
        self.ensure_open()
        deadline = Deadline(self._settings.timeout_s)
        if self._client.retired:
            if self._lock.acquire(timeout=deadline.remaining_s()):
                try:
                    self._replace_client(deadline)
                finally:
                    self._lock.release()
            deadline.check("mooncake: joining the cluster again")
        return deadline

    def _replace_client(self, deadline: Deadline) -> None:
        """Join the cluster with a new client, and register all memory again. The caller has the lock."""
        self.ensure_open()  # nobody would release the new client of a closed storage
        if not self._client.retired:
            return
        client = CLIENT_CACHE.acquire(_native_module, self._settings, deadline)
        try:
            self._buffers = {
                start: nbytes
                for start, nbytes in self._buffers.items()
                if client.register(start, nbytes)
            }
        except BaseException:
            CLIENT_CACHE.release(self._settings, client)
            raise
        self._transfers = Transfers(client, register_staging=self._settings.protocol != "tcp")
        self._client = client
        self._counters.add("clients_replaced")

    def _keys(self, space: KeySpace, hashes: Sequence[str]) -> list[str]:
        root = self._layout.root(space.id)
        return [root + page_hash for page_hash in hashes]

    def _list_keys(self, prefix: str, deadline: Deadline) -> list[str]:
        run_on_thread = self._client.run_on_thread
        return list_keys(self._settings, prefix, deadline, run_on_thread=run_on_thread)

    def _list_pages(self, space_id: str, deadline: Deadline) -> dict[str, str]:
        """Return the key and hash of each listed page.

        The list comes over HTTP, which leases no page.
        """
        root = self._layout.root(space_id)
        hashes = {
            key: self._layout.page_hash(space_id, key) for key in self._list_keys(root, deadline)
        }
        return {key: page_hash for key, page_hash in hashes.items() if page_hash is not None}

    def _read_manifest(self, space_id: str, deadline: Deadline) -> bytes:
        """Return the manifest, or b"" if there is none."""
        return self._client.call(partial(read_small, self._layout.manifest(space_id)), deadline)

    def _remove(self, keys: set[str], deadline: Deadline) -> set[str]:
        if not keys:
            return set()
        return remove_unleased(self._client, keys, deadline, before_attempt=self.ensure_open)

    def _unregister(self, start: int) -> None:
        with self._lock:
            if start not in self._buffers:
                return
            del self._buffers[start]
            if self._client.pid == os.getpid():
                self._client.unregister(start)

    def _states_before_set(
        self, native: Any, space: KeySpace, keys: list[str], deadline: Deadline
    ) -> KeyStates:
        """Return the states of the keys. If the cluster has lost the manifest, restore it first."""
        codes = presence(native, [*keys, self._layout.manifest(space.id)])
        if codes[-1] != 1:
            deadline.check("mooncake: a set")
            self._put_manifest(native, space)
        return key_states(native, keys, codes[:-1], space.stored_nbytes)

    def _put_manifest(self, native: Any, space: KeySpace) -> None:
        key = self._layout.manifest(space.id)
        checked([native.put(key, encode_manifest(space), self._replicas)])


def _sizes_text(sizes: set[int], space: KeySpace) -> str:
    found = " or ".join(f"{one:,}" for one in sorted(sizes))
    return f"it is {found} bytes long instead of {space.stored_nbytes:,}"


def _replicas(settings: MooncakeSettings) -> Any:
    """Return the native config of a put: how many replicas, and where."""
    config = _native_module.ReplicateConfig()
    config.replica_num = settings.replica_num
    if settings.preferred_segment:
        config.preferred_segments = [settings.preferred_segment]
    if settings.soft_pin_ttl_ms is not None:
        config.soft_pin_ttl_ms = settings.soft_pin_ttl_ms
    return config
