"""The stores of storms, by name."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import page_cache
import pytest
from hicache_backends.tiered import TieredSettings, TieredStorage
from hicache_conformance.tools.network.proxy import FaultProxy
from redis_servers import client_of_one
from s3_kit import config_of, make_ready
from sealed_stores import key_files
from servers import Rclone, RedisServer, ServerProcess, wait_until

from hicache_storage.backend_support.revocable import AtomicRevocable
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.page_store.frame import FRAME_NBYTES, FramedPage, Framing
from hicache_storage.registry import open_storage
from hicache_storage.storage import HiCacheStorage
from hicache_storage.testing import Fault, FaultyStorage, Odds, WrapperStorage
from storm.clusters import mooncake, redis_cluster
from storm.hazards import TIMEOUT_S, Damage, FullDisk, Hazard, Kill, Partition, Pause, Refusal, Wipe
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


class _ColdStorage(WrapperStorage):
    """`file` as engines use it: they lend their memory, and half of the gets find no cached page."""

    def __init__(self, inner: HiCacheStorage, root: Path) -> None:
        super().__init__(inner)
        self._root = root

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        _lend(pages)
        for page_hash in hashes if os.urandom(1)[0] % 2 else ():
            with suppress(FileNotFoundError):
                path = self._root / "spaces" / space.id / page_hash[:2] / page_hash
                page_cache.drop(path, sync=False)
        return super().batch_get(space, hashes, pages)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        _lend(pages)
        return super().batch_set(space, hashes, pages)


def _lend(pages: Sequence[Page]) -> None:
    for page in pages:
        page.revocable = AtomicRevocable()


@contextmanager
def _cold_file(directory: Path) -> Generator[World]:
    with _full_file(directory) as world:
        yield replace(world, open=lambda: _ColdStorage(world.open(), directory / "pages"))


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
def _hf3fs(directory: Path, **config: Any) -> Generator[World]:
    yield World(open=_of("hf3fs", {"path": str(directory / "pages"), **config}))


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
def _tiered(directory: Path, *, write: str) -> Generator[World]:
    """Yield a small disk over a server that is slow at times. Each of the two may be full."""
    with (
        small_disk(directory / "disk", _DISK_NBYTES) as disk,
        _redis_behind_proxy(directory) as (server, proxy),
    ):
        root = disk / "pages"
        config = {"write": write, "promote": "never"}
        world = _behind(proxy, server, partial(_open_tiered, root, proxy, config))
        refusals = (
            _refusal(server, "maxmemory", "1", "0"),
            _refusal(server, "min-replicas-to-write", "1", "0"),
        )
        yield replace(
            world,
            hazards=(*world.hazards, *refusals, FullDisk(disk)),
            limit_s=2 * TIMEOUT_S + 1,  # for copies of pages that are on their way, and for a tier
            strays=partial(_unpublished, root),
        )


@contextmanager
def _tiered_in_ruins(directory: Path) -> Generator[World]:
    """Yield a disk whose pages vanish or change, over a server from which they come back.

    A process may promote a page that another one deletes.
    """
    with _redis_behind_proxy(directory) as (server, proxy):
        root = directory / "pages"
        config = {"write": "back", "promote": "always"}
        world = _behind(proxy, server, partial(_open_framed, root, proxy, config))
        yield replace(
            world,
            hazards=(*world.hazards, Wipe(partial(_pages, root)), Damage(partial(_pages, root))),
            limit_s=2 * TIMEOUT_S + 1,
            retains=False,
            keeps_deletions=False,
            strays=partial(_unpublished, root),
        )


def _open_tiered(root: Path, proxy: FaultProxy, config: Mapping[str, Any]) -> TieredStorage:
    """Open a disk over a server whose calls are slow at times, so that kills come between tiers."""
    delays = [Odds(each, Fault.DELAY, 0.3) for each in ("batch_get", "batch_set", "batch_delete")]
    rack = open_storage("redis", {"url": _url_of(proxy), "timeout_s": TIMEOUT_S})
    return TieredStorage(
        {
            "disk": open_storage("file", {"path": str(root)}),
            "rack": FaultyStorage(rack, delays, seed=os.getpid(), delay_s=0.02),
        },
        TieredSettings.parse(
            "tiered",
            {
                "tiers": [
                    {"name": "disk", "backend": "file"},
                    {"name": "rack", "backend": "redis"},
                ],
                "timeout_s": TIMEOUT_S,
                "copy_nbytes": "1MiB",
                **config,
            },
        ),
    )


def _open_framed(root: Path, proxy: FaultProxy, config: Mapping[str, Any]) -> HiCacheStorage:
    return FramingStorage(_open_tiered(root, proxy, config))


class FramingStorage(WrapperStorage):
    """A storage whose pages get frames, as by a page store. A damaged page is a miss."""

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self.inner.batch_exists(_framed(space), hashes)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        frames = _frames(pages)
        hits = self.inner.batch_get(_framed(space), hashes, [one.stored for one in frames])
        wrong = Framing(_framed(space), checksum=True).errors(frames, hashes)
        return [hit and index not in wrong for index, hit in enumerate(hits)]

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        frames = _frames(pages)
        Framing(_framed(space), checksum=True).write(frames, hashes)
        return self.inner.batch_set(_framed(space), hashes, [one.stored for one in frames])

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self.inner.batch_delete(_framed(space), hashes)

    def open_space(self, space: KeySpace) -> None:
        super().open_space(_framed(space))


def _framed(space: KeySpace) -> KeySpace:
    return replace(space, frame_nbytes=FRAME_NBYTES)


def _frames(pages: Sequence[Page]) -> list[FramedPage]:
    frames = [FramedPage(memoryview(bytearray(FRAME_NBYTES)), page) for page in pages]
    for each in frames:
        each.stored.digest_skip = FRAME_NBYTES
    return frames


def _pages(root: Path) -> Iterable[Path]:
    """Return the page files of `file` under `root`."""
    return root.glob("spaces/*/??/*")


def _refusal(server: RedisServer, name: str, refuses: str, accepts: str) -> Refusal:
    def configure(value: str) -> None:
        with client_of_one(server) as client:
            client.config_set(name, value)

    return Refusal(partial(configure, refuses), partial(configure, accepts))


@contextmanager
def _striped(directory: Path) -> Generator[World]:
    """Yield two disks, of which a small one may be full."""
    with small_disk(directory / "disk", _DISK_NBYTES // 2) as disk:
        roots = (disk / "pages", directory / "pages")
        stripes = [
            {"name": name, "backend": "file", "config": {"path": str(root)}}
            for name, root in zip(("small", "large"), roots, strict=True)
        ]
        yield World(
            open=_of("striped", {"stripes": stripes}),
            hazards=(FullDisk(disk),),
            strays=lambda: [path for root in roots for path in _unpublished(root)],
        )


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
    "file-cold": _cold_file,
    "file-disk": _file_on_full_disk,
    "hf3fs": _hf3fs,
    "hf3fs-direct": partial(_hf3fs, direct=True),
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
    "tiered-disk": partial(_tiered, write="through"),
    "tiered-back-disk": partial(_tiered, write="back"),
    "tiered-ruined-disk": _tiered_in_ruins,
    "striped-disk": _striped,
}
