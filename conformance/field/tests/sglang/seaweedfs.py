"""Runs the kit on SGLang's S3 backend, as it is in its wheel: `make field-sglang-seaweedfs`.

The server is ministack, which has S3's semantics.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from field.sglang.seaweedfs import SGLangSeaweedFS
from hicache_conformance import Scratch, StorageConformance
from s3_kit import BUCKET, make_ready, read_object, write_object
from servers import Ministack, S3Server

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from hicache_storage import KeySpace


class TestSGLangSeaweedFS(StorageConformance):
    """`SeaweedFSStore` with its defaults. The tests share a server, except those that stop it."""

    storage_class = SGLangSeaweedFS
    absent = SGLangSeaweedFS.absent
    shared_server: ClassVar[S3Server]
    own_server: S3Server | None = None

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def serve(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with Ministack(tmp_path_factory.mktemp("server")) as server:
            cls.shared_server = server
            make_ready(server)
            yield

    def config(self, scratch: Scratch) -> dict[str, Any]:
        server = self._server
        own = {"endpoint": server.endpoint_url, "bucket": BUCKET, "prefix": scratch.prefix}
        keys = {"access_key": server.access_key, "secret_key": server.secret_key}
        self.fields = {"extra_config": own | keys}
        return self.fields

    @contextmanager
    def server(self) -> Generator[S3Server, None, None]:
        with tempfile.TemporaryDirectory() as directory, Ministack(Path(directory)) as server:
            self.own_server = server
            make_ready(server)
            yield server

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        return read_object(self._server, self._object(space, page_hash))

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        write_object(self._server, self._object(space, page_hash), data)

    def _object(self, space: KeySpace, page_hash: str) -> str:
        with SGLangSeaweedFS.from_config(self.fields) as store:
            return store.object_of(space, page_hash)

    @property
    def _server(self) -> S3Server:
        return self.own_server or self.shared_server
