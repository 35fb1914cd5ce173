"""The native clients of a process: one per config, because several would share their bandwidth."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from hicache_backends.mooncake.client import Client

if TYPE_CHECKING:
    from hicache_backends.mooncake.settings import MooncakeSettings
    from hicache_storage.backend_support.deadline import Deadline

_FIELDS = (
    "master_server_address",
    "local_hostname",
    "metadata_server",
    "global_segment_size",
    "local_buffer_size",
    "protocol",
    "device_name",
    "enable_ssd_offload",
    "ssd_offload_path",
    "tenant_id",
)
"""The config fields that a native client depends on."""


class ClientCache:
    """The open clients, each with the number of storages that use it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[Any, ...], tuple[Client, int]] = {}

    def acquire(self, module: Any, settings: MooncakeSettings, deadline: Deadline) -> Client:
        """Return a connected client for `settings`."""
        key = _key(settings)
        with self._lock:
            client, users = self._open.get(key, (None, 0))
            if client is not None and not client.retired:
                self._open[key] = client, users + 1
                return client
        client = Client(module, settings)
        client.connect(deadline)
        with self._lock:
            other = self._open.get(key)
            if other is None or other[0].retired:
                self._open[key] = client, 1
                return client
            self._open[key] = other[0], other[1] + 1
        client.close(deadline.remaining_s())
        return other[0]

    def release(self, settings: MooncakeSettings, client: Client) -> None:
        """Undo one `acquire`. The last release closes the client."""
        key = _key(settings)
        with self._lock:
            held, users = self._open.get(key, (client, 1))
            if held is not client:
                return
            if users > 1:
                self._open[key] = client, users - 1
                return
            self._open.pop(key, None)
        client.close()

    def forget(self) -> None:
        """Drop the parent's clients in a forked child, in which the lock may be held forever."""
        self._lock = threading.Lock()
        self._open = {}


def _key(settings: MooncakeSettings) -> tuple[Any, ...]:
    return (os.getpid(), *(getattr(settings, field) for field in _FIELDS))


CLIENT_CACHE = ClientCache()
os.register_at_fork(after_in_child=CLIENT_CACHE.forget)
