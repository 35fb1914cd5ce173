"""The kit's verdict on `mooncake`, over a real master: `make conformance-mooncake`, not `make test`.

A client takes two seconds to close, and the kit opens hundreds.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hicache_conformance import Scratch, StorageConformance
from servers import MooncakeMaster, load_mooncake

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from hicache_storage.keys import KeySpace

load_mooncake()
_backend = importlib.import_module("hicache_backends.mooncake")

_native: Any = importlib.import_module("mooncake.store")

pytestmark = pytest.mark.slow


@contextmanager
def admin_of(master: MooncakeMaster) -> Generator[Any]:
    """A bare client, for what happens behind the store's back."""
    client = _native.MooncakeDistributedStore()
    address = f"127.0.0.1:{master.port}"
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 128 << 20, "tcp", "", address) == 0
    yield client
    client.close()


FIELDS = {"global_segment_size": "512mb", "timeout_s": 5}


@pytest.fixture(scope="module")
def shared_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    with (
        MooncakeMaster(tmp_path_factory.mktemp("master")) as master,
        # As in an engine, one that stays open: storages of one config in a process share its client, and
        # to close that takes two seconds. The kit's other processes have clients of their own.
        _backend.MooncakeStorage.from_config(master.config(**FIELDS)),
    ):
        yield master


@pytest.fixture(scope="module")
def shared_admin(shared_master: MooncakeMaster) -> Iterator[Any]:
    with admin_of(shared_master) as admin:
        yield admin


class TestMooncake(StorageConformance):
    """One master, and a segment in each process that opens a storage."""

    storage_class = _backend.MooncakeStorage

    @pytest.fixture(autouse=True)
    def _master(self, shared_master: MooncakeMaster, shared_admin: Any, tmp_path: Path) -> None:
        self.master = shared_master
        self.admin = shared_admin
        self.directory = tmp_path / "own_master"
        self.tag = ""

    def config(self, scratch: Scratch) -> dict[str, Any]:
        self.tag = scratch.prefix
        return self.master.config(extra_backend_tag=scratch.prefix, **FIELDS)

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        return self.admin.get(self._key(space, page_hash)) or None

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        key = self._key(space, page_hash)
        self.admin.remove(key, True)
        if data:  # an empty object can't be
            assert self.admin.put(key, data) == 0

    @contextmanager
    def server(self) -> Generator[MooncakeMaster]:
        with MooncakeMaster(self.directory) as master:
            self.master = master
            yield master

    def _key(self, space: KeySpace, page_hash: str) -> str:
        return f"{self.tag}/{space.id}/{page_hash}"
