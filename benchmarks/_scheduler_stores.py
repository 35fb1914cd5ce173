"""The stores of `scheduler.py`: each of our backends under the page store, and SGLang's own."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import _sglang
import redis
from _hf3fs_stores import SGLangHf3fsStore
from _mooncake_stores import Cluster, SGLangMooncakeStore
from _our_stores import TIMEOUT_S, OurPageStore, in_directory
from _s3_stores import OurPagesOnS3
from _servers import TlsRedisServer, mooncake_master, null_servers, servers
from _store import nothing

from hicache_storage import open_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import TypeAlias

    from _store import Memory, Store

    Opening: TypeAlias = Callable[["Place"], AbstractContextManager["Subject"]]

_CAPACITY_BATCHES = 4
_SLOT_OVERHEAD_NBYTES = 3 * 4096
_S3_THREADS = 8
_MOONCAKE_NBYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Place:
    """The directory and the memory that a store gets."""

    directory: Path
    source: Memory
    destination: Memory
    parallelism: int | None = None
    """How many storage calls the page store makes at a time. None: as many as the backend asks for."""

    @property
    def capacity_pages(self) -> int:
        return _CAPACITY_BATCHES * self.source.pages

    @property
    def capacity_nbytes(self) -> int:
        return self.capacity_pages * (self.source.page_nbytes + _SLOT_OVERHEAD_NBYTES)

    @property
    def memories(self) -> tuple[Memory, Memory]:
        return self.source, self.destination


@dataclass(frozen=True, slots=True)
class Subject:
    """A store that is measured."""

    name: str
    store: Store
    empty: Callable[[], None]
    """A function that makes space. It does nothing for a store that evicts."""
    most_repeats: int = 64
    """For how many batches the store has space."""


@contextmanager
def _in_directory(place: Place, backend: str) -> Generator[Subject, None, None]:
    store = in_directory(
        backend,
        place.directory,
        *place.memories,
        checksum="xxh3",
        parallelism=place.parallelism,
        capacity_nbytes=place.capacity_nbytes,
    )
    yield Subject(backend, store, nothing)
    store.close()


@contextmanager
def _in_memory(place: Place) -> Generator[Subject, None, None]:
    storage = open_storage("memory", {"capacity_nbytes": place.capacity_nbytes})
    store = OurPageStore(storage, *place.memories, parallelism=place.parallelism)

    def empty() -> None:
        for space in storage.spaces():
            storage.clear(space)

    yield Subject("memory", store, empty, most_repeats=_CAPACITY_BATCHES - 1)
    store.close()


@contextmanager
def _on_redis(place: Place, *, tls: bool) -> Generator[Subject, None, None]:
    with (TlsRedisServer if tls else servers.RedisServer)(place.directory) as server:
        port = server.port
        config: dict[str, Any] = {"url": server.url, "timeout_s": TIMEOUT_S}
        if tls:
            url, authority = f"rediss://127.0.0.1:{port}", place.directory / "ca.crt"
            config |= {"url": url, "tls_ca_file": str(authority)}
        store = OurPageStore(
            open_storage("redis", config), *place.memories, parallelism=place.parallelism
        )
        client: Any = redis.Redis(port=port, ssl=tls, ssl_cert_reqs="none")
        name = "redis over TLS" if tls else "redis"
        yield Subject(name, store, client.flushall, most_repeats=4)
        client.close()
        store.close()


@contextmanager
def _on_s3(place: Place, *, tls: bool) -> Generator[Subject, None, None]:
    if tls:
        servers.make_certificates(place.directory)
    with null_servers(place.directory if tls else None) as ports:
        threads, scheme = place.parallelism or _S3_THREADS, "https" if tls else "http"
        store = OurPagesOnS3(ports[-1], *place.memories, threads=threads, scheme=scheme)
        store.port = ports[0]  # for `clear`, which does not use TLS
        yield Subject("s3 over TLS" if tls else "s3", store, store.clear, most_repeats=1)
        store.close()


@contextmanager
def _sglang_file(place: Place) -> Generator[Subject, None, None]:
    from _sglang_file_store import HiCacheFileStore  # noqa: PLC0415 - needs torch

    store = HiCacheFileStore(
        place.directory, *place.memories, capacity_nbytes=place.capacity_nbytes
    )
    yield Subject("SGLang's file", store, nothing)
    store.close()


@contextmanager
def _sglang_hf3fs(place: Place) -> Generator[Subject, None, None]:
    store = SGLangHf3fsStore(place.directory, *place.memories, capacity_pages=place.capacity_pages)
    yield Subject("SGLang's hf3fs", store, nothing)
    store.close()


@contextmanager
def _on_mooncake(place: Place, *, sglang: bool) -> Generator[Subject, None, None]:
    with ExitStack() as stack:
        master = stack.enter_context(mooncake_master(place.directory))
        stack.enter_context(servers.MooncakeNode(master, str(_MOONCAKE_NBYTES)))
        cluster = Cluster(master.config(global_segment_size=0, timeout_s=TIMEOUT_S))
        stack.callback(cluster.storage.close)
        cluster.touch(_MOONCAKE_NBYTES * 3 // 4)
        store: Store
        if sglang:
            store, name = SGLangMooncakeStore(cluster, *place.memories), "SGLang's mooncake"
        else:
            name, opened = "mooncake", cluster.opened()
            store = OurPageStore(opened, *place.memories, parallelism=place.parallelism)
        stack.callback(store.close)
        yield Subject(name, store, cluster.empty, most_repeats=4)


def openings() -> dict[str, Opening]:
    """Return a way to open each store that this environment has."""
    found: dict[str, Opening] = {
        "file": lambda place: _in_directory(place, "file"),
        "hf3fs": lambda place: _in_directory(place, "hf3fs"),
        "memory": _in_memory,
        "redis": lambda place: _on_redis(place, tls=False),
        "redis-tls": lambda place: _on_redis(place, tls=True),
        "s3": lambda place: _on_s3(place, tls=False),
        "s3-tls": lambda place: _on_s3(place, tls=True),
    }
    has_mooncake = importlib.util.find_spec("mooncake") is not None
    if has_mooncake:
        found["mooncake"] = lambda place: _on_mooncake(place, sglang=False)
    if _sglang.is_installed():
        found["sglang-file"] = _sglang_file
        found["sglang-hf3fs"] = _sglang_hf3fs
        if has_mooncake:
            found["sglang-mooncake"] = lambda place: _on_mooncake(place, sglang=True)
    return found
