"""The stores of storms, by name."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hicache_conformance.tools.network.proxy import FaultProxy
from s3_kit import config_of, make_ready
from sealed_stores import key_files
from servers import Rclone, RedisServer, ServerProcess, wait_until

from hicache_storage.registry import open_storage
from hicache_storage.storage import HiCacheStorage
from storm.clusters import mooncake, redis_cluster
from storm.hazards import TIMEOUT_S, FullDisk, Hazard, Kill, Partition, Pause
from storm.world import LIMIT_S, World, has_no_client

_DISK_NBYTES = 1 << 20
"""Less than all pages of a storm take."""
_SLOTS_DISK_NBYTES = 18 << 20
"""Slots for one of the key spaces of a storm, and the 16 MiB that `hf3fs` leaves free."""
_LOG_DISK_NBYTES = 32 << 20
"""All pages and their log, which a Redis server rewrites while it is four times as large."""
_DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


def _of(backend: str, config: dict[str, Any]) -> Callable[[], HiCacheStorage]:
    return partial(open_storage, backend, config)


def _unpublished(root: Path) -> list[str]:
    """Return the unpublished files of `file` under `root`."""
    return [str(path) for path in root.glob("writers/*/*")]


@contextmanager
def _file(directory: Path) -> Generator[World]:
    root = directory / "pages"
    yield World(open=_of("file", {"path": str(root)}), strays=partial(_unpublished, root))


@contextmanager
def _full_file(directory: Path) -> Generator[World]:
    config = {"path": str(directory / "pages"), "capacity_nbytes": 1 << 20}
    yield World(
        open=_of("file", config),
        strays=partial(_unpublished, directory / "pages"),
        retains=False,
    )


@contextmanager
def _file_on_full_disk(directory: Path) -> Generator[World]:
    with small_disk(directory / "disk", _DISK_NBYTES) as disk:
        root = disk / "pages"
        yield World(
            open=_of("file", {"path": str(root)}),
            hazards=(FullDisk(disk),),
            strays=partial(_unpublished, root),
        )


@contextmanager
def _hf3fs(directory: Path) -> Generator[World]:
    yield World(open=_of("hf3fs", {"path": str(directory / "pages")}))


@contextmanager
def _hf3fs_on_full_disk(directory: Path) -> Generator[World]:
    with small_disk(directory / "disk", _SLOTS_DISK_NBYTES) as disk:
        yield World(open=_of("hf3fs", {"path": str(disk / "pages")}), hazards=(FullDisk(disk),))


@contextmanager
def _fsspec(directory: Path) -> Generator[World]:
    url = (directory / "pages").as_uri()
    yield World(open=_of("fsspec", {"url": url}))


@contextmanager
def _encrypted(directory: Path) -> Generator[World]:
    root = directory / "pages"
    config = {"backend": "file", "config": {"path": str(root)}, **key_files(directory)}
    yield World(open=_of("encrypted", config), strays=partial(_unpublished, root))


@contextmanager
def _encrypted_redis(directory: Path) -> Generator[World]:
    with _redis_behind_proxy(directory) as (server, proxy):
        inner = {"url": _url_of(proxy)}
        config = {"backend": "redis", "config": inner, "timeout_s": TIMEOUT_S}
        yield _behind(proxy, server, _of("encrypted", {**config, **key_files(directory)}))


@contextmanager
def _hf3fs_redis(directory: Path) -> Generator[World]:
    with _redis_behind_proxy(directory) as (server, proxy):
        config = {"path": str(directory / "pages"), "index": _url_of(proxy)}
        yield _behind(proxy, server, _of("hf3fs", {**config, "timeout_s": TIMEOUT_S}))


@contextmanager
def _redis(directory: Path) -> Generator[World]:
    with _redis_behind_proxy(directory) as (server, proxy):
        config = {"url": _url_of(proxy), "timeout_s": TIMEOUT_S}
        yield _behind(proxy, server, _of("redis", config))


@contextmanager
def _redis_on_full_disk(directory: Path) -> Generator[World]:
    rewritten = ("--auto-aof-rewrite-min-size", "4mb")
    with (
        small_disk(directory / "disk", _LOG_DISK_NBYTES) as disk,
        RedisServer(disk / "server", *_DURABLE, *rewritten) as server,
    ):
        config = {"url": server.url, "timeout_s": TIMEOUT_S}
        yield _over(server, _of("redis", config), FullDisk(disk, server))


@contextmanager
def _s3(directory: Path) -> Generator[World]:
    with (
        Rclone(directory / "server") as server,
        FaultProxy(("127.0.0.1", server.port)) as proxy,
    ):
        make_ready(server)
        url = "http://{}:{}".format(*proxy.address)
        config = config_of(server, "storm", timeout_s=TIMEOUT_S, endpoint_url=url)
        yield replace(_behind(proxy, server, _of("s3", config)), lingers=True)


@contextmanager
def _s3_on_full_disk(directory: Path) -> Generator[World]:
    with (
        small_disk(directory / "disk", _DISK_NBYTES) as disk,
        Rclone(disk / "server") as server,
    ):
        make_ready(server)
        config = config_of(server, "storm", timeout_s=TIMEOUT_S)
        yield replace(_over(server, _of("s3", config), FullDisk(disk, server)), lingers=True)


@contextmanager
def _redis_behind_proxy(directory: Path) -> Generator[tuple[RedisServer, FaultProxy]]:
    with (
        RedisServer(directory / "server", *_DURABLE) as server,
        FaultProxy(("127.0.0.1", server.port)) as proxy,
    ):
        yield server, proxy


def _url_of(proxy: FaultProxy) -> str:
    return "redis://{}:{}/0".format(*proxy.address)


def _behind(
    proxy: FaultProxy, server: ServerProcess, opened: Callable[[], HiCacheStorage]
) -> World:
    hazards = (Kill(server), Pause(server), Partition(proxy))
    return replace(_over(server, opened, *hazards), proxy=proxy)


def _over(server: ServerProcess, opened: Callable[[], HiCacheStorage], *hazards: Hazard) -> World:
    return World(
        open=opened,
        hazards=hazards,
        limit_s=LIMIT_S,
        settle=partial(wait_until, partial(has_no_client, server)),
    )


@contextmanager
def small_disk(directory: Path, nbytes: int) -> Generator[Path]:
    """Mount a file system in memory. This needs root."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "hicache-storm", str(directory)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no small disk here: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)  # noqa: S607  # root's PATH


WORLDS: dict[str, Callable[[Path], AbstractContextManager[World]]] = {
    "file": _file,
    "file-capacity": _full_file,
    "file-disk": _file_on_full_disk,
    "hf3fs": _hf3fs,
    "hf3fs-disk": _hf3fs_on_full_disk,
    "hf3fs-redis": _hf3fs_redis,
    "fsspec": _fsspec,
    "encrypted": _encrypted,
    "encrypted-redis": _encrypted_redis,
    "redis": _redis,
    "redis-disk": _redis_on_full_disk,
    "redis-cluster": partial(redis_cluster, 0),
    "redis-failover": partial(redis_cluster, 1),
    "s3": _s3,
    "s3-disk": _s3_on_full_disk,
    "mooncake": mooncake,
}
