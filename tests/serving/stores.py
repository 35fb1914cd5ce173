"""The stores below an engine, each with its config, its server if it has one, and its faults.

    with opened("redis", tmp_path) as store:
        server.attach(ours(store.backend, store.config))
        store.pause()

Pages are damaged through the SDK, so one way works for every store: read a page, flip a bit, write it.
`flip_in_files` damages the pages of stores that come with an engine.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servers import MooncakeMaster, MooncakeNode, Rclone, RedisServer, ServerProcess, wait_until

from hicache_storage import open_storage
from hicache_storage.page import Page
from hicache_storage.storage import HiCacheStorage

KEEPING = ("file", "redis", "s3", "hf3fs", "mooncake", "encrypted", "tiered")
"""The stores whose pages outlive an engine's process. Those of `memory` do not."""
WITH_SERVER = ("redis", "s3", "mooncake", "tiered")
IN_DIRECTORY = ("file", "hf3fs", "encrypted", "tiered")
"""`tiered` is `file` above Redis: either tier may fail."""
_FILLER = "filler"
_SEGMENT = "512mb"
_BLOCK_NBYTES = 1 << 16


@dataclass
class Store:
    """A store that an engine can use, and what may happen to it."""

    backend: str
    config: dict[str, Any]
    server: ServerProcess | None = None
    directory: Path | None = None
    """Where a store without a server has its pages."""
    inner: Store | None = None
    """The store that `encrypted` keeps its pages in, or the first tier of `tiered`."""
    node: MooncakeNode | None = field(default=None, repr=False)

    def pause(self) -> None:
        """Stop the threads of the store's server: nothing answers."""
        self._server.pause()

    def resume(self) -> None:
        self._server.resume()

    def kill(self) -> None:
        """Kill the server."""
        if self.node is not None:
            self.node.__exit__()
        self._server.stop()

    def start_empty(self) -> None:
        """Start a killed server again, on the same port and without its pages."""
        shutil.rmtree(self._server.directory / "data", ignore_errors=True)
        self._server.start()
        if isinstance(self.server, Rclone):
            _create_bucket(self.server)
        if self.node is not None:
            self.node.__enter__()

    def remove_directory(self) -> None:
        """Remove the directory with all pages. Repeat while the engine writes to it."""
        assert self.directory is not None, f"{self.backend} has no directory"
        while self.directory.exists():
            shutil.rmtree(self.directory, ignore_errors=True)

    def make_directory(self) -> None:
        """Make the removed directory again, empty."""
        assert self.directory is not None, f"{self.backend} has no directory"
        self.directory.mkdir(exist_ok=True)

    def fill(self) -> None:
        """Remove the pages, and leave no room for others.

        The directory must be on `small_disk`, unless the store is Redis.
        """
        if isinstance(self.server, RedisServer):
            self._command_redis("CONFIG SET maxmemory 1")
            self.clear()
            return
        assert self.directory is not None, f"{self.backend} cannot be filled"
        filler = self.directory.parent / _FILLER
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(_BLOCK_NBYTES))
        self.clear()
        with suppress(OSError), filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(_BLOCK_NBYTES))

    def make_room(self) -> None:
        """Take back what `fill` did."""
        if isinstance(self.server, RedisServer):
            self._command_redis("CONFIG SET maxmemory 0")
        else:
            assert self.directory is not None
            (self.directory.parent / _FILLER).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all pages."""
        with self.open() as storage:
            for space in list(storage.spaces()):
                storage.clear(space)

    def pages(self) -> int:
        """Return how many pages the store has."""
        with self.open() as storage:
            return sum(1 for space in storage.spaces() for _ in storage.scan(space))

    def damage(self, share: float = 1.0, seed: int | None = None) -> int:
        """Flip one bit in each page, or in a share of them. Return the number of damaged pages.

        The bit is one of an exponent in the middle of the page. With a seed it is a random one.
        """
        generator = random.Random(seed)
        with self._innermost.open() as storage:
            return sum(
                _flip(storage, space, page.page_hash, None if seed is None else generator)
                for space in list(storage.spaces())
                for page in list(storage.scan(space))
                if generator.random() < share
            )

    def open(self) -> HiCacheStorage:
        return open_storage(self.backend, self.config)

    @property
    def _innermost(self) -> Store:
        return self if self.inner is None else self.inner

    @property
    def _server(self) -> ServerProcess:
        assert self.server is not None, f"{self.backend} has no server"
        return self.server

    def _command_redis(self, command: str) -> None:
        assert isinstance(self.server, RedisServer)
        with self.server.connected() as connection:
            connection.sendall(f"{command}\r\n".encode())
            assert connection.recv(64) == b"+OK\r\n"


class EngineStore(Store):
    """A store that comes with an engine, in a directory or a server. The SDK can't open it."""

    def clear(self) -> None:
        """Remove all pages, as an operator does who has no other way."""
        if isinstance(self.server, RedisServer):
            self._command_redis("FLUSHALL")
            return
        assert self.directory is not None
        for path in self.directory.rglob("*"):
            if path.is_file():
                path.unlink(missing_ok=True)


@contextmanager
def opened(name: str, directory: Path, **fields: Any) -> Generator[Store]:
    """Yield a store of `KEEPING`, or `memory`, with its server running. `fields` go into its config."""
    with ExitStack() as stack:
        yield _opened(name, directory, stack, fields)


@contextmanager
def small_disk(directory: Path, size: str) -> Generator[Path]:
    """Mount a file system of so few bytes, and yield a directory on it."""
    import pytest

    directory.mkdir(parents=True)
    mount, unmount = shutil.which("mount"), shutil.which("umount")
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    if (
        mount is None
        or unmount is None
        or subprocess.run([mount, *options], check=False).returncode
    ):
        pytest.skip("this user may not mount")
    try:
        yield directory / "pages"
    finally:
        wait_until(lambda: not subprocess.run([unmount, directory], check=False).returncode)


def flip_in_files(paths: Iterable[Path], share: float = 1.0, seed: int | None = None) -> int:
    """Flip one bit in each file, or in a share of them, of pages that come from another store.

    The bit is chosen as by `Store.damage`. Return the number of damaged files.
    """
    generator = random.Random(seed)
    chosen = [path for path in sorted(paths) if generator.random() < share]
    for path in chosen:
        with path.open("r+b") as file:
            place, bit = _chosen(path.stat().st_size, None if seed is None else generator)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ bit]))
    return len(chosen)


def _chosen(nbytes: int, generator: random.Random | None) -> tuple[int, int]:
    """Return which byte of a page is damaged, and in which bit."""
    if generator is not None:
        return generator.randrange(nbytes), 1 << generator.randrange(8)
    return nbytes // 2 // 4 * 4 + 3, _EXPONENT_BIT


_EXPONENT_BIT = 0x40
"""In the last byte of a float32, in which its sign and most of its exponent are."""


def _flip(
    storage: HiCacheStorage, space: Any, page_hash: str, generator: random.Random | None
) -> bool:
    data = bytearray(space.stored_nbytes)
    if not storage.batch_get(space, [page_hash], [Page(data)])[0]:
        return False
    place, bit = _chosen(len(data), generator)
    data[place] ^= bit
    storage.batch_delete(space, [page_hash])
    return storage.batch_set(space, [page_hash], [Page(data)])[0]


def _create_bucket(server: Rclone) -> None:
    import s3_kit

    s3_kit.make_ready(server)


def _opened(name: str, directory: Path, stack: ExitStack, fields: dict[str, Any]) -> Store:
    place = directory / "pages"
    if name == "redis":
        redis = stack.enter_context(RedisServer(directory / "redis"))
        return Store(name, {"url": redis.url, **fields}, redis)
    if name == "s3":
        import s3_kit

        rclone = stack.enter_context(Rclone(directory / "s3"))
        _create_bucket(rclone)
        return Store(name, s3_kit.config_of(rclone, **fields), rclone)
    if name == "mooncake":
        from servers import load_mooncake

        load_mooncake()
        master = stack.enter_context(MooncakeMaster(directory / "mooncake"))
        node = stack.enter_context(MooncakeNode(master, _SEGMENT))
        return Store(name, master.config(global_segment_size=0, **fields), master, node=node)
    if name == "encrypted":
        from sealed_stores import key_files

        directory.mkdir(parents=True, exist_ok=True)
        inner = Store("file", {"path": str(place), **fields}, directory=place)
        sealed = {"backend": "file", "config": inner.config, **key_files(directory)}
        return Store(name, sealed, directory=place, inner=inner)
    if name == "tiered":
        redis = stack.enter_context(RedisServer(directory / "redis"))
        first = Store("file", {"path": str(place)}, directory=place)
        tiers = [
            {"name": "disk", "backend": first.backend, "config": first.config},
            {"name": "rack", "backend": "redis", "config": {"url": redis.url}},
        ]
        return Store(name, {"tiers": tiers, **fields}, redis, place, first)
    in_memory = name == "memory"
    path = {} if in_memory else {"path": str(place)}
    more = {"capacity_nbytes": "1GiB"} if name == "hf3fs" else {}
    return Store(name, {**path, **more, **fields}, directory=None if in_memory else place)
