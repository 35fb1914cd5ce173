"""The stores of a storm: how to open each, what it promises, and what may happen to it."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hicache_conformance.tools.network.proxy import FaultProxy
from s3_kit import config_of, make_ready
from servers import Rclone, RedisServer, ServerProcess, wait_until

from hicache_storage.registry import open_storage
from storm.hazards import TIMEOUT_S, FullDisk, Hazard, Kill, Partition, Pause

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    from hicache_storage.storage import HiCacheStorage

LIMIT_S = TIMEOUT_S + 1
"""The time within which a call on a server must end."""
_DISK_NBYTES = 1 << 20
"""Less than all pages of a storm need."""
_SLOTS_DISK_NBYTES = 18 << 20
"""Slots for one of the key spaces of a storm, and the 16 MiB that `hf3fs` leaves free."""
_LISTEN, _TIME_WAIT = "0A", "06"


def _nothing() -> None:
    """Do nothing."""


def _none() -> list[str]:
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A store that processes share."""

    open: Callable[[], HiCacheStorage]
    hazards: tuple[Hazard, ...] = ()
    """What may happen to its server or disk."""
    limit_s: float | None = None
    """The time within which a call must end. None: nothing bounds a file system."""
    retains: bool = True
    """Whether an accepted page stays until it is deleted. False: it may be evicted or forgotten."""
    keeps_deletions: bool = True
    """Whether a deleted page stays away until it is set."""
    settle: Callable[[], None] = _nothing
    """Wait until no request of a killed process can take effect any more."""
    strays: Callable[[], list[str]] = _none
    """Return the unpublished files that killed processes have left."""


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
def _redis(directory: Path) -> Generator[World]:
    options = ("--appendonly", "yes", "--appendfsync", "always")
    with (
        RedisServer(directory / "server", *options) as server,
        FaultProxy(("127.0.0.1", server.port)) as proxy,
    ):
        url = "redis://{}:{}/0".format(*proxy.address)
        yield _behind(proxy, server, _of("redis", {"url": url, "timeout_s": TIMEOUT_S}))


@contextmanager
def _s3(directory: Path) -> Generator[World]:
    with (
        Rclone(directory / "server") as server,
        FaultProxy(("127.0.0.1", server.port)) as proxy,
    ):
        make_ready(server)
        url = "http://{}:{}".format(*proxy.address)
        config = config_of(server, "storm", timeout_s=TIMEOUT_S, endpoint_url=url)
        yield _behind(proxy, server, _of("s3", config))


def _behind(
    proxy: FaultProxy, server: ServerProcess, opened: Callable[[], HiCacheStorage]
) -> World:
    return World(
        open=opened,
        hazards=(Kill(server), Pause(server), Partition(proxy)),
        limit_s=LIMIT_S,
        settle=partial(wait_until, partial(_has_no_client, server)),
    )


def _has_no_client(server: ServerProcess) -> bool:
    """Return whether the server has closed all its connections, and done what came over them."""
    lines = Path(f"/proc/{server.pid}/net/tcp").read_text("ascii").splitlines()[1:]
    fields = [line.split() for line in lines]
    return not any(
        local.endswith(f":{server.port:04X}") and state not in (_LISTEN, _TIME_WAIT)
        for _, local, _, state, *_ in fields
    )


@contextmanager
def small_disk(directory: Path, nbytes: int) -> Generator[Path]:
    """Mount a file system in memory. It needs root."""
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
    "redis": _redis,
    "s3": _s3,
}
