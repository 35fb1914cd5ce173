"""The kit's verdict on `fsspec`, over filesystems of each kind."""

from __future__ import annotations

import importlib
import socket
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hicache_backends.fsspec import FsspecStorage
from hicache_conformance import Scratch, StorageConformance
from servers import ServerProcess, program

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from hicache_conformance import Server

    from hicache_storage.keys import KeySpace

fsspec: Any = importlib.import_module("fsspec")  # it has no types


class TestMemory(StorageConformance):
    """Whole writes, in this process."""

    storage_class = FsspecStorage

    def config(self, scratch: Scratch) -> dict[str, Any]:
        self.root = f"/{scratch.prefix}"
        return {"url": f"memory:/{self.root}"}

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        filesystem = fsspec.filesystem("memory")
        try:
            return bytes(filesystem.cat_file(f"{self.root}/{space.id}/{page_hash}"))
        except FileNotFoundError:
            return None

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        filesystem = fsspec.filesystem("memory")
        path = f"{self.root}/{space.id}/{page_hash}"
        if data is not None:
            filesystem.pipe_file(path, data)
        elif filesystem.exists(path):
            filesystem.rm_file(path)


class TestLocal(StorageConformance):
    """Writes aside, and an atomic rename."""

    storage_class = FsspecStorage

    def config(self, scratch: Scratch) -> dict[str, Any]:
        return {"url": f"file://{scratch.path}/kv"}


class TestDirect(StorageConformance):
    """Writes in place, as on a filesystem that nothing is known of."""

    storage_class = FsspecStorage

    def config(self, scratch: Scratch) -> dict[str, Any]:
        return {"url": f"file://{scratch.path}/kv", "atomic": "none"}


class SftpServer(ServerProcess):
    """rclone's SFTP server over a directory."""

    user, password = "pages", "open sesame"

    def command(self) -> list[str]:
        (self.directory / "data").mkdir(exist_ok=True)
        address = f"127.0.0.1:{self.port}"
        login = ["--user", self.user, "--pass", self.password]
        return [
            program("rclone"),
            "serve",
            "sftp",
            str(self.directory / "data"),
            "--addr",
            address,
            *login,
            "--cache-dir",
            str(self.directory / "keys"),
        ]

    def environment(self) -> dict[str, str]:
        return {"RCLONE_CONFIG": str(self.directory / "rclone.conf")}

    def answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            return connection.recv(4) == b"SSH-"


@pytest.fixture(scope="module")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SftpServer]:
    with SftpServer(tmp_path_factory.mktemp("sftp")) as server:
        yield server


class TestSftp(StorageConformance):
    """A blocking network filesystem: writes aside, and the server's atomic rename."""

    storage_class = FsspecStorage

    @pytest.fixture(autouse=True)
    def _shared_server(self, sftp: SftpServer) -> None:
        self.running = sftp

    def config(self, scratch: Scratch) -> dict[str, Any]:
        self.prefix = scratch.prefix
        return {
            "url": f"sftp://127.0.0.1:{self.running.port}/{scratch.prefix}",
            "storage_options": {
                "username": SftpServer.user,
                "password": SftpServer.password,
                "look_for_keys": False,
                "allow_agent": False,
            },
        }

    def _path(self, space: KeySpace, page_hash: str) -> Path:
        return self.running.directory / "data" / self.prefix / space.id / page_hash

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        path = self._path(space, page_hash)
        return path.read_bytes() if path.exists() else None

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        path = self._path(space, page_hash)
        path.unlink(missing_ok=True) if data is None else path.write_bytes(data)

    @contextmanager
    def server(self) -> Generator[Server, None, None]:
        with tempfile.TemporaryDirectory() as directory, SftpServer(Path(directory)) as server:
            self.running = server
            yield server
