"""The kit's verdict on `fsspec` over s3fs and a real S3 server; runs where s3fs is: `make test-s3fs`."""

from __future__ import annotations

import tempfile
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hicache_backends.fsspec import FsspecStorage
from hicache_conformance import Scratch, StorageConformance
from servers import Ministack

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from hicache_conformance import Server

    from hicache_storage.keys import KeySpace

pytest.importorskip("s3fs", reason="s3fs has an environment of its own: make test-s3fs")

BUCKET = "pages"


def request(server: Ministack, method: str, name: str, data: bytes | None = None) -> bytes | None:
    """What the server answers, past the backend; None where there is no such object."""
    url = f"{server.endpoint_url}/{BUCKET}/{name}"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, method=method), timeout=30
        ) as reply:
            return bytes(reply.read())
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            return None
        raise


@contextmanager
def running(directory: Path) -> Generator[Ministack, None, None]:
    """A server with an empty bucket."""
    with Ministack(directory) as server:
        request(server, "PUT", "")
        yield server


@pytest.fixture(scope="module")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ministack]:
    with running(tmp_path_factory.mktemp("ministack")) as server:
        yield server


class TestS3(StorageConformance):
    storage_class = FsspecStorage

    @pytest.fixture(autouse=True)
    def _shared_server(self, ministack: Ministack) -> None:
        self.running = ministack

    def config(self, scratch: Scratch) -> dict[str, Any]:
        self.prefix = scratch.prefix
        return {
            "url": f"s3://{BUCKET}/{scratch.prefix}",
            "storage_options": {
                "key": Ministack.access_key,
                "secret": Ministack.secret_key,
                "endpoint_url": self.running.endpoint_url,
            },
        }

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
