"""`fsspec` over SFTP: a blocking network filesystem, whose client neither reconnects nor gives up."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hicache_backends.fsspec import FsspecStorage
from hicache_conformance import FaultProxy
from pages import blank, hash_of, page, space
from servers import ServerProcess, program

from hicache_storage.errors import StorageTimeout, StorageUnavailable

SPACE = space()
A, B = hash_of(1), hash_of(2)


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


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SftpServer]:
    with SftpServer(tmp_path / "server") as started:
        yield started


def opened(port: int, **fields: Any) -> FsspecStorage:
    login = {"username": SftpServer.user, "password": SftpServer.password}
    options = {**login, "look_for_keys": False, "allow_agent": False}
    url = f"sftp://127.0.0.1:{port}/kv"
    store = FsspecStorage.from_config({"url": url, "storage_options": options, **fields})
    store.open_space(SPACE)
    return store


def test_what_was_set_is_there(server: SftpServer) -> None:
    with opened(server.port) as store:
        assert store.batch_set(SPACE, [A, B], [page(seed=1), page(seed=2)]) == [True, True]
        assert store.batch_get(SPACE, [A, B], [first := blank(), blank()]) == [True, True]
        assert store.batch_exists(SPACE, [B, hash_of(3)]) == [True, False]

    assert page(seed=1).tobytes() == first.tobytes()


def test_a_page_that_is_there_is_replaced(server: SftpServer) -> None:
    with opened(server.port) as store:
        store.batch_set(SPACE, [A], [page(seed=1)])
        store.batch_set(SPACE, [A], [page(seed=2)])
        store.batch_get(SPACE, [A], [found := blank()])

    assert page(seed=2).tobytes() == found.tobytes()


def test_listings_deletes_and_clear(server: SftpServer) -> None:
    with opened(server.port) as store:
        store.batch_set(SPACE, [A, B], [page(), page()])
        store.batch_delete(SPACE, [A])

        assert [SPACE] == list(store.spaces())
        assert [B] == [info.page_hash for info in store.scan(SPACE)]
        assert store.clear(SPACE) == 1


def test_a_key_space_is_removed_with_its_directory(server: SftpServer) -> None:
    with opened(server.port) as store:
        store.batch_set(SPACE, [A, B], [page(), page()])

        assert store.remove_space(SPACE.id) == 2
        assert [] == list(store.spaces())
        assert [] == list(store.unreadable_spaces())
        assert not (server.directory / "data" / "kv" / SPACE.id).exists()


def test_it_connects_again_when_the_server_is_back(server: SftpServer) -> None:
    with opened(server.port) as store:
        store.batch_set(SPACE, [A], [page()])
        server.stop()
        with pytest.raises(StorageUnavailable):
            store.batch_get(SPACE, [A], [blank()])
        server.start()

        assert store.batch_get(SPACE, [A], [blank()]) == [True]


def test_a_silent_server_is_a_timeout_and_no_thread_waits_for_ever(server: SftpServer) -> None:
    with (
        FaultProxy(("127.0.0.1", server.port)) as proxy,
        opened(proxy.address[1], timeout_s=1) as store,
    ):
        store.batch_set(SPACE, [A], [page()])
        proxy.go_silent()
        with pytest.raises(StorageTimeout):
            store.batch_get(SPACE, [A], [blank()])
        proxy.drop_held()
        proxy.pass_through()

        assert store.batch_get(SPACE, [A], [blank()]) == [True]
