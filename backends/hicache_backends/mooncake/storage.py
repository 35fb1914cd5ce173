"""The storage: pages as objects of a Mooncake Store, moved by its own client without a copy."""

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
from hicache_storage.backend_support.manifest import decode_manifest, encode_manifest
from hicache_storage.errors import HiCacheError, StorageClosed, StorageTimeout
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

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import HostBuffer

_native_module = driver.load()


class MooncakeStorage(HiCacheStorage):
    """Pages in the memory of a Mooncake cluster.

    A page is lost with the process that lends its memory.
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
        self._client = CLIENT_CACHE.acquire(_native_module, settings)
        self._buffers: list[int] = []
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

    def ensure_open(self) -> None:
        if self.is_forked_copy:
            raise StorageClosed(FORKED)
        super().ensure_open()

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self._client.call(lambda native: self._put_manifest(native, space), self._deadline())

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        keys = self._keys(space, hashes)
        if not keys:
            return []
        codes = self._client.call(lambda native: presence(native, keys), self._deadline())
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
        self.ensure_open()
        keys = self._keys(space, hashes)
        leased = self._remove(set(keys), self._deadline())
        self._counters.add("leased_pages", len(leased))
        return [key not in leased for key in keys]

    def spaces(self) -> Iterator[KeySpace]:
        if not self.capabilities.enumerable:
            return super().spaces()
        self.ensure_open()
        deadline = self._deadline()
        found: list[KeySpace] = []
        for key in self._list_keys(self._layout.prefix, deadline):
            space_id = self._layout.space_id(key)
            if space_id is not None:
                data = self._client.call(partial(read_small, key), deadline)
                space = decode_manifest(data, space_id=space_id)
                if space is not None:
                    found.append(space)
        return iter(found)

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        if not self.capabilities.enumerable:
            return super().scan(space)
        self.ensure_open()
        deadline = self._deadline()
        hashes = self._list_pages(space, deadline)
        keys = list(hashes)
        sizes = self._client.call(lambda native: object_sizes(native, keys), deadline)
        return iter(
            [
                PageInfo(page_hash, space.stored_nbytes)
                for key, page_hash in hashes.items()
                if may_be_whole(sizes.get(key), space.stored_nbytes)
            ]
        )

    def clear(self, space: KeySpace) -> int:
        if not self.capabilities.enumerable:
            return super().clear(space)
        self.ensure_open()
        deadline = self._deadline()
        keys = set(self._list_pages(space, deadline))
        leased = self._remove(keys, deadline)
        if leased:
            raise StorageTimeout(
                f"mooncake: {len(leased)} pages are leased to readers for longer than"
                f" {self._settings.timeout_s:g} s; {len(keys) - len(leased)} were cleared: call it again"
            )
        return len(keys)

    def register_buffer(self, buffer: HostBuffer) -> None:
        self.ensure_open()
        for start, nbytes in Page(buffer).addresses:
            if self._client.register(start, nbytes):
                with self._lock:
                    self._buffers.append(start)
            else:  # pages of this buffer are copied
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
            was_closed, self._closed = self._closed, True
        if was_closed:
            return
        try:
            for start in list(self._buffers):
                self._unregister(start)
        except HiCacheError:  # too many calls are overdue: the close of the client frees the memory
            self._buffers.clear()
        finally:
            CLIENT_CACHE.release(self._settings, self._client)

    # --- parts ---------------------------------------------------------------------------------------

    def _deadline(self) -> Deadline:
        """Return the deadline of a call that begins now."""
        return Deadline(self._settings.timeout_s)

    def _keys(self, space: KeySpace, hashes: Sequence[str]) -> list[str]:
        root = self._layout.root(space.id)
        return [root + page_hash for page_hash in hashes]

    def _list_keys(self, prefix: str, deadline: Deadline) -> list[str]:
        run_on_thread = self._client.run_on_thread
        return list_keys(self._settings, prefix, deadline, run_on_thread=run_on_thread)

    def _list_pages(self, space: KeySpace, deadline: Deadline) -> dict[str, str]:
        """Return key and hash of each listed page. The list comes over HTTP, which leases no page."""
        root = self._layout.root(space.id)
        hashes = {
            key: self._layout.page_hash(space.id, key) for key in self._list_keys(root, deadline)
        }
        return {key: page_hash for key, page_hash in hashes.items() if page_hash is not None}

    def _remove(self, keys: set[str], deadline: Deadline) -> set[str]:
        if not keys:
            return set()
        return remove_unleased(self._client, keys, deadline, before_attempt=self.ensure_open)

    def _unregister(self, start: int) -> None:
        with self._lock:
            if start not in self._buffers:
                return
            self._buffers.remove(start)
        if self._client.pid == os.getpid():
            self._client.unregister(start)

    def _states_before_set(
        self, native: Any, space: KeySpace, keys: list[str], deadline: Deadline
    ) -> KeyStates:
        """Return the states of the keys. Restore the manifest first, if the cluster has lost it."""
        codes = presence(native, [*keys, self._layout.manifest(space.id)])
        if codes[-1] != 1:
            deadline.check("mooncake: a set")
            self._put_manifest(native, space)
        return key_states(native, keys, codes[:-1], space.stored_nbytes)

    def _put_manifest(self, native: Any, space: KeySpace) -> None:
        key = self._layout.manifest(space.id)
        checked([native.put(key, encode_manifest(space), self._replicas)])


def _replicas(settings: MooncakeSettings) -> Any:
    """Return the native config of a put: the number and the place of replicas."""
    config = _native_module.ReplicateConfig()
    config.replica_num = settings.replica_num
    if settings.preferred_segment:
        config.preferred_segments = [settings.preferred_segment]
    if settings.soft_pin_ttl_ms is not None:
        config.soft_pin_ttl_ms = settings.soft_pin_ttl_ms
    return config
