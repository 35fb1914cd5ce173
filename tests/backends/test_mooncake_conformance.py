"""The kit's verdict on `mooncake`, over a real master."""

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

load_mooncake()
_backend = importlib.import_module("hicache_backends.mooncake")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    with MooncakeMaster(tmp_path_factory.mktemp("master")) as master:
        yield master


class TestMooncake(StorageConformance):
    """One master, and a segment in each process that opens a storage."""

    storage_class = _backend.MooncakeStorage

    @pytest.fixture(autouse=True)
    def _master(self, shared_master: MooncakeMaster, tmp_path: Path) -> None:
        self.master = shared_master
        self.directory = tmp_path / "own_master"

    def config(self, scratch: Scratch) -> dict[str, Any]:
        return self.master.config(
            extra_backend_tag=scratch.prefix, global_segment_size="512mb", timeout_s=5
        )

    @contextmanager
    def server(self) -> Generator[MooncakeMaster]:
        with MooncakeMaster(self.directory) as self.master:
            yield self.master
