"""`fsspec` over s3fs and real S3 servers: the kit's verdict, and what only an object store shows.

It runs where s3fs is, which needs an older botocore than ours: `make test-s3fs`.
"""

from __future__ import annotations

import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hicache_backends.fsspec import FsspecStorage
from hicache_backends.fsspec.layout import manifest_name
from hicache_conformance import FaultProxy, Scratch, Server, StorageConformance
from pages import blank, hash_of, page, space
from servers import Ministack, Rclone, S3Server

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import ConfigError, StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.registry import open_storage

pytest.importorskip("s3fs", reason="s3fs has an environment of its own: make test-s3fs")

BUCKET = "pages"
SPACE = space()
A, B = hash_of(1), hash_of(2)


def request(server: S3Server, method: str, name: str, data: bytes | None = None) -> bytes | None:
    """Return the body of the server's answer, or None if there is no such object."""
    url = f"{server.endpoint_url}/{BUCKET}/{name}"
    asked = urllib.request.Request(url, data, method=method)  # noqa: S310  # http only
    try:
        with urllib.request.urlopen(asked, timeout=30) as reply:  # noqa: S310
            return bytes(reply.read())
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            return None
        raise


@contextmanager
def running(directory: Path) -> Generator[Ministack, None, None]:
    """Yield a server with an empty bucket."""
    with Ministack(directory) as server:
        request(server, "PUT", "")
        yield server


def config(server: S3Server, prefix: str, **options: Any) -> dict[str, Any]:
    login = {"key": server.access_key, "secret": server.secret_key}
    return {
        "url": f"s3://{BUCKET}/{prefix}",
        "storage_options": {**login, "endpoint_url": server.endpoint_url, **options},
    }


@pytest.fixture(scope="module")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ministack]:
    with running(tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture
def store(ministack: Ministack, request: pytest.FixtureRequest) -> Iterator[FsspecStorage]:
    with FsspecStorage.from_config(config(ministack, request.node.name)) as opened:
        opened.open_space(SPACE)
        yield opened


def test_a_missing_bucket_is_a_config_error(ministack: Ministack) -> None:
    with pytest.raises(ConfigError, match=r"url: the bucket of s3://nowhere/kv does not exist"):
        FsspecStorage.from_config({**config(ministack, ""), "url": "s3://nowhere/kv"})


def test_a_wrong_key_is_unavailable_and_not_shown(tmp_path: Path) -> None:
    with Rclone(tmp_path) as server:
        wrong = config(server, "kv", secret="not the one")  # noqa: S106
        with pytest.raises(StorageUnavailable, match="PermissionError") as caught:
            FsspecStorage.from_config(wrong)

    assert "not the one" not in str(caught.value)


def test_signatures_are_right(tmp_path: Path) -> None:
    with Rclone(tmp_path) as server:
        (tmp_path / "data" / BUCKET).mkdir()
        with FsspecStorage.from_config(config(server, "kv")) as store:
            store.open_space(SPACE)
            store.batch_set(SPACE, [A], [page(seed=1)])
            store.batch_get(SPACE, [A], [found := blank()])

    assert page(seed=1).tobytes() == found.tobytes()


def test_a_key_space_without_its_manifest_is_told_and_removed(
    ministack: Ministack, store: FsspecStorage, request: pytest.FixtureRequest
) -> None:
    store.batch_set(SPACE, [A], [page()])
    store._run(
        lambda _: store._mounts.get().files.remove(manifest_name(SPACE.id)), store._deadline()
    )
    with open_storage("fsspec", config(ministack, request.node.name), read_only=True) as looking:
        assert [SPACE.id] == [one.space_id for one in looking.unreadable_spaces()]
        assert [] == list(looking.spaces())

    assert store.remove_space(SPACE.id) == 1
    with pytest.raises(ConfigError, match="there is no store"):
        open_storage("fsspec", config(ministack, request.node.name), read_only=True)


def test_a_get_is_one_request(ministack: Ministack) -> None:
    with FaultProxy(("127.0.0.1", ministack.port)) as proxy:
        host, port = proxy.address
        options = {"endpoint_url": f"http://{host}:{port}"}
        with FsspecStorage.from_config(config(ministack, "turns", **options)) as store:
            store.open_space(SPACE)
            store.batch_set(SPACE, [A], [page()])
            before = proxy.turns
            store.batch_get(SPACE, [A], [blank()])

            assert proxy.turns - before == 1


def test_options_of_the_user_come_first_and_leave_ours(ministack: Ministack) -> None:
    options = {"config_kwargs": {"max_pool_connections": 3}}
    with FsspecStorage.from_config(config(ministack, "options", **options)) as store:
        filesystem = store._mounts.get().files._filesystem()[0]

        assert filesystem.config_kwargs["max_pool_connections"] == 3
        assert filesystem.config_kwargs["response_checksum_validation"] == "when_required"


def test_a_put_carries_a_checksum(ministack: Ministack) -> None:
    """Without a checksum ministack accepts half a body as the whole object."""
    with FsspecStorage.from_config(config(ministack, "checksums")) as store:
        filesystem = store._mounts.get().files._filesystem()[0]
        chosen = filesystem._s3.meta.config.request_checksum_calculation

    assert chosen == "when_supported"


def test_listings_by_the_first_digit_are_the_whole_listing(store: FsspecStorage) -> None:
    """`clear` splits a listing that takes too long."""
    hashes = [hash_of(number) for number in range(40)]
    store.batch_set(SPACE, hashes, [page() for _ in hashes])

    def names(prefix: str) -> list[str]:
        return [one.name for one in store._entries(SPACE.id, prefix, Deadline(30.0))]

    assert sorted(hashes) == [name for digit in "0123456789abcdef" for name in names(digit)]


def test_a_forked_child_has_connections_of_its_own(store: FsspecStorage) -> None:
    store.batch_set(SPACE, [A], [page(seed=1)])
    child = os.fork()
    if child == 0:
        hit = store.batch_get(SPACE, [A], [found := blank()]) == [True]
        store.batch_set(SPACE, [B], [page(seed=2)])
        store.close()
        os._exit(0 if hit and found.tobytes() == page(seed=1).tobytes() else 1)

    assert os.waitpid(child, 0)[1] == 0
    assert store.batch_get(SPACE, [A, B], [blank(), blank()]) == [True, True]


class TestS3(StorageConformance):
    """`fsspec` over S3: writes are whole, and calls run on an event loop."""

    storage_class = FsspecStorage

    @pytest.fixture(autouse=True)
    def _shared_server(self, ministack: Ministack) -> None:
        self.running = ministack

    def config(self, scratch: Scratch) -> dict[str, Any]:
        self.prefix = scratch.prefix
        # ministack's time for a page grows with the square of the size: 64 MiB take 20 s and more.
        return {**config(self.running, scratch.prefix), "timeout_s": 120.0}

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        return request(self.running, "GET", f"{self.prefix}/{space.id}/{page_hash}")

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        method = "DELETE" if data is None else "PUT"
        request(self.running, method, f"{self.prefix}/{space.id}/{page_hash}", data)

    @contextmanager
    def server(self) -> Generator[Server, None, None]:
        with tempfile.TemporaryDirectory() as directory, running(Path(directory)) as server:
            self.running = server
            yield server
