"""The places in which `scale.py` fills stores: directories, and servers on loopback."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _disk import files_below
from _servers import null_server, redis_server
from redis import Redis

from hicache_storage.registry import open_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from hicache_storage.storage import HiCacheStorage

TIMEOUT_S = 600.0
_TTL = "30d"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place for one store of pages, and what can be done to the store there."""

    backend: str
    config: Mapping[str, Any]
    nbytes: Callable[[], int] | None = None
    """A function that returns how many bytes the store takes in its place."""
    fill_capacity: Callable[[int], Mapping[str, Any]] | None = None
    """A function that makes the used bytes the capacity, and returns the fields of a storage that
    evicts.
    """
    evicted: Callable[[HiCacheStorage], int] | None = None
    """A function that returns how many pages were evicted so far."""
    evictions_a_page: float = 0.0
    """The share of the pages whose eviction takes several sweeps over the store."""
    forget_counts: Callable[[], None] | None = None
    """A function that removes the recorded counts, so that the next storage must look at every page."""
    ample_capacity: Callable[[int], Mapping[str, Any]] = lambda _: {}
    """A function that returns the fields of a storage that must count its bytes but evicts nothing."""

    def open(self, **fields: Any) -> HiCacheStorage:
        """Open a storage here."""
        return open_storage(self.backend, {**self.config, **fields})


@contextmanager
def memory_place(_: Path | None) -> Generator[Place, None, None]:
    """Provide a store in the memory of this process."""
    yield Place(backend="memory", config={})


@contextmanager
def file_place(directory: Path | None) -> Generator[Place, None, None]:
    """Provide an empty directory for the backend `file`."""
    with _new_directory(directory) as root:
        yield Place(
            backend="file",
            config={"path": str(root), "timeout_s": TIMEOUT_S},
            nbytes=lambda: _allocated_nbytes(root),
            fill_capacity=lambda used: {"capacity_nbytes": used},
            evicted=lambda storage: storage.stats().counters.get("evicted", 0),
            evictions_a_page=3 / 2,
            forget_counts=(root / "usage").unlink,
            ample_capacity=lambda used: {"capacity_nbytes": 2 * used},
        )


@contextmanager
def hf3fs_place(directory: Path | None) -> Generator[Place, None, None]:
    """Provide an empty directory for the backend `hf3fs` with an index in SQLite."""
    with _new_directory(directory) as root:

        def forget() -> None:
            for path in root.glob("index*"):
                path.unlink()

        yield Place(
            backend="hf3fs",
            config={"path": str(root), "timeout_s": TIMEOUT_S},
            nbytes=lambda: _allocated_nbytes(root),
            fill_capacity=lambda used: {"capacity_nbytes": -(-used * 20 // 19)},
            evicted=lambda storage: storage.stats().counters.get("evicted", 0),
            forget_counts=forget,
        )


@contextmanager
def hf3fs_redis_place(directory: Path | None) -> Generator[Place, None, None]:
    """Provide an empty directory for the backend `hf3fs` with an index in Redis."""
    with redis_server() as port, hf3fs_place(directory) as place:
        config = {**place.config, "index": f"redis://127.0.0.1:{port}/0"}
        yield replace(place, config=config, forget_counts=None)


@contextmanager
def redis_place(_: Path | None) -> Generator[Place, None, None]:
    """Run a Redis server without persistence, in which pages expire far in the future."""
    with ExitStack() as stack:
        port = stack.enter_context(redis_server())
        client: Any = stack.enter_context(Redis(host="127.0.0.1", port=port))

        def used_nbytes() -> int:
            return int(client.info("memory")["used_memory"])

        def fill_capacity(_: int) -> Mapping[str, Any]:
            client.config_set("maxmemory-policy", "volatile-ttl")
            client.config_set("maxmemory", used_nbytes())
            return {}

        yield Place(
            backend="redis",
            config={"url": f"redis://127.0.0.1:{port}/0", "timeout_s": TIMEOUT_S, "ttl_s": _TTL},
            nbytes=used_nbytes,
            fill_capacity=fill_capacity,
            evicted=lambda _: int(client.info("stats")["evicted_keys"]),
        )


@contextmanager
def s3_place(_: Path | None) -> Generator[Place, None, None]:
    """Run a server that stores objects in the memory of its process."""
    with null_server() as port:
        yield Place(
            backend="s3",
            config={
                "bucket": "pages",
                "endpoint_url": f"http://127.0.0.1:{port}",
                "access_key_id": "scale",
                "secret_access_key": "scale-scale-scale",
                "timeout_s": TIMEOUT_S,
            },
        )


PLACES = {
    "memory": memory_place,
    "file": file_place,
    "redis": redis_place,
    "hf3fs": hf3fs_place,
    "hf3fs-redis": hf3fs_redis_place,
    "s3": s3_place,
}


@contextmanager
def _new_directory(parent: Path | None) -> Generator[Path, None, None]:
    root = Path(tempfile.mkdtemp(prefix="hicache-scale-", dir=parent))
    try:
        yield root
    finally:
        shutil.rmtree(root)


def _allocated_nbytes(root: Path) -> int:
    """Return the bytes of all blocks that the file system has allocated for files below `root`."""
    return sum(os.stat(path).st_blocks * 512 for path in files_below(root))  # noqa: PTH116 - millions
