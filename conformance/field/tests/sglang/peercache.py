"""Runs the kit on PeerCache's SGLang backend, over its storage server: `make field-peercache`."""

from __future__ import annotations

import importlib
import multiprocessing
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest
from field.sglang.peercache import PeerCache, has_storage
from hicache_conformance import Scratch, StorageConformance
from hicache_conformance.case.case import Case
from scratch_servers import ScratchServers
from servers import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from hicache_storage import KeySpace

_LOOPBACK = {
    "local_hostname": "127.0.0.1",
    "rdma_bind_host": "127.0.0.1",
    "control_bind_host": "127.0.0.1",
    "meta_bind_host": "127.0.0.1",
    "protocol": "tcp",
    "metrics_enabled": False,
}
_FAST = {"heartbeat_interval": 0.1, "member_ttl": 1.5}
"""So that a group settles in a moment: these are 2 s and 6 s by default."""
_FORKS = multiprocessing.get_context("forkserver")
"""Forks each server from a process that has imported torch once."""
_FORKS.set_forkserver_preload(["__main__", "field.sglang.peercache_server"])


class _Forked:
    """A forked process with the methods of `subprocess.Popen` that a `ServerProcess` calls."""

    def __init__(self, *arguments: Any) -> None:
        serve = importlib.import_module("field.sglang.peercache_server").serve
        self._process = _FORKS.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        self.pid = self._process.pid
        self.kill, self.wait = self._process.kill, self._process.join

    def poll(self) -> int | None:
        return self._process.exitcode


class PeerCacheServer(ServerProcess):
    """PeerCache's `StorageServer` on loopback, with 512 MB of memory and no disk."""

    ready_limit_s = 120.0  # the first one waits for the import of torch

    def __init__(self, directory: Path, **fields: Any) -> None:
        super().__init__(directory)
        self.fields = fields

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def launch(self) -> None:
        fields = _LOOPBACK | {
            "discovery_addr": self.address,
            "role": "storage",
            "global_segment_size": "512mb",
            "disk_enabled": False,
        }
        self._process = cast("Any", _Forked(fields | self.fields, str(self.log)))

    def answers(self) -> bool:
        return has_storage(self.address)

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a back door of the storage server."""
        rpc = importlib.import_module("peercache.rpc").RpcClientPool()
        try:
            members = rpc.call(self.address, "members")["members"]
            (own,) = [one for one in members if one["role"] == "storage"]
            return rpc.call(f"127.0.0.1:{own['control_port']}", method, arguments)
        finally:
            rpc.close()


class TestPeerCache(StorageConformance):
    """`PeerCacheStore` with its defaults, but ten heartbeats a second. Each scratch has a server."""

    storage_class = PeerCache
    absent = PeerCache.absent
    servers: ClassVar[ScratchServers[PeerCacheServer]]
    served: PeerCacheServer
    sizes: ClassVar[dict[str, Any]] = {}
    """The memory of the next server, if it is not the default."""

    @pytest.fixture(autouse=True)
    def _servers(self, tmp_path: Path) -> Generator[None, None, None]:
        with ScratchServers(self._fast, tmp_path) as type(self).servers:
            yield

    def _fast(self, directory: Path) -> PeerCacheServer:
        return PeerCacheServer(directory, **_FAST, **self.sizes)

    def config(self, scratch: Scratch) -> dict[str, Any]:
        if not hasattr(self, "own"):
            self.served = self.servers.of(scratch.prefix)
        return self._fields()

    def small_config(self, scratch: Scratch, capacity_nbytes: int) -> dict[str, Any]:
        type(self).sizes = {"global_segment_size": capacity_nbytes}
        try:
            return self.config(Scratch(scratch.path, f"{scratch.prefix}small"))
        finally:
            type(self).sizes = {}

    @contextmanager
    def server(self) -> Generator[PeerCacheServer, None, None]:
        with self._fast(self.servers.directory / "own") as self.own:
            self.served = self.own
            yield self.own

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        parts = self.served.call(
            "peek", names=[name for name, _ in self._objects(space, page_hash)]
        )
        return None if None in parts else b"".join(parts)

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        """Replace each object with its part of `data`, and the last one with the rest."""
        objects = self._objects(space, page_hash)
        for name, nbytes in objects:
            size = nbytes if name != objects[-1][0] else len(data or b"")
            self.served.call("tamper", name=name, data=data and data[:size])
            data = data and data[size:]

    def _objects(self, space: KeySpace, page_hash: str) -> list[tuple[str, int]]:
        with PeerCache.from_config(self._fields()) as store:
            return store.objects_of(space, page_hash)

    def _fields(self) -> dict[str, Any]:
        own = {
            "discovery_addr": self.served.address,
            "mode": "centralized",
            "role": "inference",
            "disk_enabled": False,
        }
        return {"extra_config": _LOOPBACK | _FAST | own}


def test_a_client_that_starts_finds_all_pages_at_once(tmp_path: Path) -> None:
    subject = TestPeerCache()
    with PeerCacheServer(tmp_path, **_FAST) as subject.served, Case(subject) as case:
        subject.own = subject.served
        space = case.space()
        pages = case.contents(space, case.hashes(128))
        first = case.open()
        first.open_space(space)
        assert all(first.set(space, pages))
        second = case.open()
        second.open_space(space)

        assert all(second.exists(space, list(pages)))
        second.storage.close()
        assert all(first.exists(space, list(pages)))
