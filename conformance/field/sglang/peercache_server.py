"""A storage server of PeerCache with back doors, for a process that was forked to run it."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

from field.sglang.peercache import tell_known_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping

_MODULE: Any = importlib.import_module("peercache.storage_server")


def serve(fields: Mapping[str, Any], log: str) -> None:
    """Run a storage server until the process that started this one has ended."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    server = _MODULE.StorageServer(_MODULE.PeerCacheConfig(**fields))
    pool, runtime = server._pool, server.runtime  # noqa: SLF001 - there is no other way into it

    def peek(wanted: Mapping[str, Any]) -> list[bytes | None]:
        places = {name: place for name, *place in pool.snapshot()}
        names: list[str] = wanted["names"]
        return [ctypes.string_at(*places[one]) if one in places else None for one in names]

    def tamper(wanted: Mapping[str, Any]) -> None:
        name, data = wanted["name"], wanted["data"]
        runtime.directory.delete([name])
        pool.remove(name)
        if data:
            server._on_data_ingest({"pages": [{"key": name, "data": data}]})  # noqa: SLF001

    tell_known_nodes(runtime)
    runtime.control_rpc.register("peek", peek)
    runtime.control_rpc.register("tamper", tamper)
    server.start()
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
