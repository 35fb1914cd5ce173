"""The stores of a storm: how to open each, what it promises, and its server."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from s3_kit import config_of, make_ready
from servers import Rclone, RedisServer, ServerProcess

from hicache_storage.registry import open_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from hicache_storage.storage import HiCacheStorage

TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class World:
    """A store that processes share."""

    open: Callable[[], HiCacheStorage]
    server: ServerProcess | None = None
    """The server, which keeps accepted pages when it is killed. None: there is none to kill."""
    retains: bool = True
    """Whether an accepted page stays until it is deleted. False: it may be evicted."""


def _of(backend: str, config: dict[str, Any]) -> Callable[[], HiCacheStorage]:
    return partial(open_storage, backend, config)


@contextmanager
def _file(directory: Path) -> Generator[World]:
    yield World(_of("file", {"path": str(directory / "pages")}))


@contextmanager
def _full_file(directory: Path) -> Generator[World]:
    config = {"path": str(directory / "pages"), "capacity_nbytes": 1 << 20}
    yield World(_of("file", config), retains=False)


@contextmanager
def _hf3fs(directory: Path) -> Generator[World]:
    yield World(_of("hf3fs", {"path": str(directory / "pages")}))


@contextmanager
def _redis(directory: Path) -> Generator[World]:
    options = ("--appendonly", "yes", "--appendfsync", "always")
    with RedisServer(directory / "server", *options) as server:
        yield World(_of("redis", {"url": server.url, "timeout_s": TIMEOUT_S}), server)


@contextmanager
def _s3(directory: Path) -> Generator[World]:
    with Rclone(directory / "server") as server:
        make_ready(server)
        yield World(_of("s3", config_of(server, "storm", timeout_s=TIMEOUT_S)), server)


WORLDS: dict[str, Callable[[Path], AbstractContextManager[World]]] = {
    "file": _file,
    "file-full": _full_file,
    "hf3fs": _hf3fs,
    "redis": _redis,
    "s3": _s3,
}
