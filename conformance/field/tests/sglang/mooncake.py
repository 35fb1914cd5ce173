"""Runs the kit on SGLang's Mooncake backend, as it is in its wheel: `make field-sglang-mooncake`.

The cluster is a real master and a node that lends memory; transfers use TCP.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from field.sglang.mooncake import SGLangMooncake
from hicache_conformance import Scratch, StorageConformance
from servers import MooncakeMaster, MooncakeNode, load_mooncake

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_storage import KeySpace

load_mooncake()
_native: Any = importlib.import_module("mooncake.store")

_DEFAULT_LEASE = "--default_kv_lease_ttl=5000ms"
_FORGETS_THE_DEAD = (
    "--client_ttl=3",
    "--put_start_discard_timeout_sec=2",
    "--put_start_release_timeout_sec=3",
)


class TestSGLangMooncake(StorageConformance):
    """`MooncakeStore` in engines that lend no memory. The tests share a cluster."""

    storage_class = SGLangMooncake
    absent = SGLangMooncake.absent
    shared_master: ClassVar[MooncakeMaster]
    admin: ClassVar[Any]
    directories: ClassVar[pytest.TempPathFactory]
    own_master: MooncakeMaster | None = None

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def started(cls, tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
        cls.directories = tmp_path_factory
        with cls.cluster() as cls.shared_master:
            cls.admin = _native.MooncakeDistributedStore()
            address = f"127.0.0.1:{cls.shared_master.port}"
            place = ("127.0.0.1", "P2PHANDSHAKE", 0, 128 << 20, "tcp", "", address)
            assert cls.admin.setup(*place) == 0
            yield
            cls.admin.close()

    @classmethod
    @contextmanager
    def cluster(cls) -> Generator[MooncakeMaster, None, None]:
        """Run a master with its node."""
        options = (_DEFAULT_LEASE, *_FORGETS_THE_DEAD)
        with (
            MooncakeMaster(cls.directories.mktemp("master"), *options) as master,
            MooncakeNode(master, "1gb"),
        ):
            yield master

    def config(self, scratch: Scratch) -> dict[str, Any]:
        own = (self.own_master or self.shared_master).config(
            global_segment_size=0,
            metadata_server="P2PHANDSHAKE",
            extra_backend_tag=scratch.prefix,
        )
        self.fields = {"extra_config": own}
        return self.fields

    @contextmanager
    def server(self) -> Generator[MooncakeMaster, None, None]:
        with self.cluster() as self.own_master:
            yield self.own_master

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        with SGLangMooncake.from_config(self.fields) as store:
            objects = store.objects_of(space, page_hash)
        there = [self.admin.get(name) for name, _ in objects]
        return b"".join(there) if all(there) else None

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        """Replace each object with its part of `data`, and the last one with the rest.

        An object can't be empty.
        """
        with SGLangMooncake.from_config(self.fields) as store:
            objects = store.objects_of(space, page_hash)
        for name, nbytes in objects:
            self.admin.remove(name, True)
            if data:
                size = nbytes if name != objects[-1][0] else len(data)
                assert self.admin.put(name, data[:size]) == 0
                data = data[size:]
