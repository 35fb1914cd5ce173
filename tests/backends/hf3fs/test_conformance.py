"""The kit's checks of `hf3fs` with both indexes, with direct access to the slots."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hicache_backends.hf3fs import Hf3fsStorage
from hicache_conformance import Scratch, StorageConformance
from servers import RedisServer

from hicache_storage import KeySpace
from hicache_storage.backend_support.deadline import Deadline


class _InSlots(StorageConformance):
    """The kit's tests with back doors to the slots of a store."""

    def config(self, scratch: Scratch) -> dict[str, Any]:
        self.settings: dict[str, Any] = {"path": str(scratch.path), **self.further(scratch)}
        return self.settings

    def further(self, scratch: Scratch) -> dict[str, Any]:
        """Return further fields of the config."""
        return {}

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        with self._slot(space, page_hash) as slot:
            if slot is None:
                return None
            file, _ = slot
            return file.read(space.stored_nbytes)

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        """Replace the bytes of a page in its slot.

        Shorter data are followed by zeros up to the end of the slot.
        """
        with self._slot(space, page_hash) as slot:
            if slot is None:
                return
            file, rest_nbytes = slot
            whole = data is not None and len(data) >= space.stored_nbytes
            kept = data or b""
            file.write(kept[:rest_nbytes] if whole else kept.ljust(rest_nbytes, b"\0"))

    @contextmanager
    def _slot(
        self, space: KeySpace, page_hash: str
    ) -> Generator[tuple[BinaryIO, int] | None, None, None]:
        """Yield the slot file, positioned at the page, and the bytes up to the end of the slot."""
        with Hf3fsStorage.from_config(self.settings) as storage:
            files = storage._files_of(space)
            with storage._mount.get().index.view(files, Deadline(30)) as view:
                place = view.find([page_hash]).get(page_hash)
            if place is None:
                yield None
                return
            number, offset = files.geometry.position(place.slot)
            with open(files.path(number), "r+b") as file:  # noqa: PTH123 - a path of the store's
                lead_nbytes = files.geometry.lead_nbytes
                file.seek(offset + lead_nbytes)
                yield file, files.geometry.slot_nbytes - lead_nbytes


class TestSqliteIndex(_InSlots):
    storage_class = Hf3fsStorage

    def further(self, scratch: Scratch) -> dict[str, Any]:
        return {"direct": True}


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


class TestRedisIndex(_InSlots):
    storage_class = Hf3fsStorage
    in_quick_runs = "kv_(00[3-6]|10[34]|30[457]|40[23]|50)"

    @pytest.fixture(autouse=True)
    def _one_server_for_all(self, redis_url: str) -> None:
        self.url = redis_url

    def further(self, scratch: Scratch) -> dict[str, Any]:
        return {"index": self.url}

    @contextmanager
    def server(self) -> Generator[RedisServer, None, None]:
        with tempfile.TemporaryDirectory() as directory, RedisServer(Path(directory)) as server:
            self.url = server.url
            yield server
