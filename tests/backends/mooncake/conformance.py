"""The kit's verdict on `mooncake`, over a real master: `make conformance-mooncake`.

`make test` runs the checks of `in_quick_runs`, in a process of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import pytest
from hicache_conformance import Scratch, StorageConformance
from hicache_conformance.run.subject import Subject
from servers import MooncakeMaster, MooncakeNode, load_mooncake

from hicache_storage.keys import KeySpace

load_mooncake()
_backend: Any = importlib.import_module("hicache_backends.mooncake")

_native: Any = importlib.import_module("mooncake.store")
NODE_SEGMENT = "1gb"


@contextmanager
def admin_client(master: MooncakeMaster) -> Generator[Any]:
    """Yield a bare client, for changes behind the store's back."""
    client = _native.MooncakeDistributedStore()
    address = f"127.0.0.1:{master.port}"
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 128 << 20, "tcp", "", address) == 0
    yield client
    client.close()


def _pinned() -> Any:
    config = _native.ReplicateConfig()
    config.with_hard_pin = True
    return config


class OnOneMaster(Subject):
    """One master for all tests of a class. Each test has a tag of its own."""

    storage_class = _backend.MooncakeStorage
    fields: ClassVar[dict[str, Any]]
    """Fields of the config in addition to the address of the master."""
    node_segment: ClassVar[str] = ""
    """The memory that a separate process lends. Empty: there is no such process."""
    ballast_mib: ClassVar[int] = 0
    """How much of that memory is always in use."""
    shared_master: ClassVar[MooncakeMaster]
    admin: ClassVar[Any]
    directories: ClassVar[pytest.TempPathFactory]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def started(cls, tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
        cls.directories = tmp_path_factory
        with ExitStack() as stack:
            cls.shared_master = stack.enter_context(cls.cluster())
            # One storage stays open, as in an engine: storages of one config in a process share a
            # client, whose close takes two seconds. The kit's other processes have clients of their own.
            stack.enter_context(cls.storage_class.from_config(cls.config_of(cls.shared_master)))
            cls.admin = stack.enter_context(admin_client(cls.shared_master))
            for number in range(cls.ballast_mib):
                assert cls.admin.put(f"ballast/{number}", bytes(1 << 20), _pinned()) == 0
            yield

    @classmethod
    @contextmanager
    def cluster(cls) -> Generator[MooncakeMaster, None, None]:
        """Run a master, and the node if there is one."""
        directory = cls.directories.mktemp("master")
        # The master soon discards pages of dead writers.
        forgets = (
            "--client_ttl=3",
            "--put_start_discard_timeout_sec=2",
            "--put_start_release_timeout_sec=3",
        )
        with MooncakeMaster(directory, *forgets) as master:
            if not cls.node_segment:
                yield master
                return
            with MooncakeNode(master, cls.node_segment):
                yield master

    @classmethod
    def config_of(cls, master: MooncakeMaster) -> dict[str, Any]:
        return master.config(timeout_s=5, **cls.fields)

    def config(self, scratch: Scratch) -> dict[str, Any]:
        self._tag = scratch.prefix
        master = getattr(self, "_own_master", self.shared_master)
        return {**self.config_of(master), "extra_backend_tag": self._tag}

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        return self.admin.get(self._key(space, page_hash)) or None

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        key = self._key(space, page_hash)
        self.admin.remove(key, True)
        if data:  # an object can't be empty
            assert self.admin.put(key, data) == 0

    @contextmanager
    def server(self) -> Generator[MooncakeMaster, None, None]:
        with self.cluster() as self._own_master:
            yield self._own_master

    def _key(self, space: KeySpace, page_hash: str) -> str:
        return f"{self._tag}/{space.id}/{page_hash}"


class TestMooncake(OnOneMaster, StorageConformance):
    """Engines that lend no memory, and a node that does, so pages outlive their writers."""

    fields: ClassVar[dict[str, Any]] = {"global_segment_size": 0}
    node_segment = NODE_SEGMENT
    in_quick_runs = (
        "kv_(003_any|005|007_a_deleted_page_is|008_every|103_clear_spares_look|104_scan|202|303_u"
        "|304_a_s.*(refuses|silent)|305_(a_late_page|it_works_again_after_the)|306_it"
        "|402_a_connection|403_a_damaged_object_is|404_a_flipped_bit_is|501_readers|502_a_page_set)"
    )


class TestEachLends(OnOneMaster, StorageConformance):
    """Processes that each lend memory. The pages in a process's memory are lost when it dies."""

    fields: ClassVar[dict[str, Any]] = {"global_segment_size": "512mb"}
    in_quick_runs = "kv_(003_any|502_processes)"


class TestFull(OnOneMaster, StorageConformance):
    """A cluster with space for some dozens of pages. Most checks need more."""

    fields: ClassVar[dict[str, Any]] = {"global_segment_size": 0}
    node_segment = "16mb"
    ballast_mib = 15  # the smallest segment has 16 MiB
    concerns = "kv_006"
    in_quick_runs = "kv_006_a_page_that_has"
