"""The kit's verdict on `encrypted`, over backends of several kinds."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hicache_backends.encrypted import EncryptedStorage
from hicache_conformance import Scratch, StorageConformance
from redis_servers import KINDS, AnyServer, config_of, put, stored
from sealed_stores import key_files, page_file, stored_under

from hicache_storage.keys import KeySpace


class Sealed(StorageConformance):
    """The key files of one test."""

    @pytest.fixture(autouse=True)
    def _write_keys(self, tmp_path: Path) -> None:
        self.keys = key_files(tmp_path)


class TestOverMemory(Sealed):
    """`encrypted` over a backend that overwrites pages."""

    storage_class = EncryptedStorage
    in_quick_runs = "kv_(00[35]|10[123]|20[123]|303)"

    def config(self, scratch: Scratch) -> dict[str, Any]:
        return {"backend": "memory", **self.keys}

    def small_config(self, scratch: Scratch, capacity_nbytes: int) -> dict[str, Any]:
        return {**self.config(scratch), "config": {"capacity_nbytes": capacity_nbytes}}


class TestOverFile(Sealed):
    """`encrypted` over a backend that keeps a page's first bytes, and survives a crash."""

    storage_class = EncryptedStorage
    in_quick_runs = "kv_(205|402|403|404)"

    def config(self, scratch: Scratch) -> dict[str, Any]:
        self.root = scratch.path / "kv"
        return {"backend": "file", "config": {"path": str(self.root)}, **self.keys}

    def small_config(self, scratch: Scratch, capacity_nbytes: int) -> dict[str, Any]:
        config = self.config(scratch)
        return {**config, "config": {**config["config"], "capacity_nbytes": capacity_nbytes}}

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        path = page_file(self.root, space, page_hash)
        return path.read_bytes() if path.is_file() else None

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        path = page_file(self.root, space, page_hash)
        if data is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(data)


class TestOverRedis(Sealed):
    """`encrypted` over a server, whose silence must not delay a call beyond the time limit."""

    storage_class = EncryptedStorage
    in_quick_runs = "kv_901_a_bounded"
    kind = KINDS["redis"]
    running: AnyServer

    @pytest.fixture(autouse=True)
    def _start(self, tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
        with self.kind.start(tmp_path_factory.mktemp("server")) as self.running:
            yield

    def config(self, scratch: Scratch) -> dict[str, Any]:
        self.prefix = f"{scratch.prefix}:"
        inner = {**config_of(self.running), "prefix": self.prefix}
        return {"backend": "redis", "config": inner, **self.keys}

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        return stored(self.running, self.prefix, *stored_under(space, page_hash))

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        put(self.running, self.prefix, *stored_under(space, page_hash), data)

    @contextmanager
    def server(self) -> Generator[AnyServer, None, None]:
        yield self.running
