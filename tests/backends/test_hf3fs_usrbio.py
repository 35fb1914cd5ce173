"""The way through 3FS's own client, against a stand-in of its documented interface.

There is no 3FS without its cluster and RDMA hardware: this shows that the calls fit together, no more.
"""

from __future__ import annotations

import errno
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hicache_backends.hf3fs import Hf3fsStorage
from pages import blank, hash_of, page, space

from hicache_storage import BackendNotInstalled, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPACE = space(page_nbytes=65536)
HASHES = [hash_of(number) for number in range(20)]


class Ring:
    """Does what was prepared when it is waited for."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._prepared: list[tuple[memoryview, bool, int, int]] = []

    def prepare(self, vector: memoryview, reading: bool, descriptor: int, offset: int) -> None:  # noqa: FBT001
        assert descriptor in self._client.registered
        self._prepared.append((vector, reading, descriptor, offset))

    def submit(self) -> Ring:
        return self

    def wait(self, *, min_results: int, timeout: object) -> list[Any]:
        assert min_results == len(self._prepared)
        prepared, self._prepared = self._prepared, []
        if self._client.fails:
            return [] if self._client.fails == errno.ETIMEDOUT else [_Result(-self._client.fails)]
        return [self._moved(*each) for each in prepared]

    def _moved(self, vector: memoryview, reading: bool, descriptor: int, offset: int) -> Any:  # noqa: FBT001
        self._client.moves += 1
        if reading:
            return _Result(os.preadv(descriptor, [vector], offset))
        return _Result(os.pwritev(descriptor, [vector], offset))


class _Result(SimpleNamespace):
    def __init__(self, result: int) -> None:
        super().__init__(result=result)


class Client(ModuleType):
    """As much of `hf3fs_fuse.io` as is used."""

    def __init__(self) -> None:
        super().__init__("hf3fs_fuse.io")
        self.registered: set[int] = set()
        self.moves = 0
        self.fails = 0
        self.mount: str | None = "/3fs"
        self.register_fd = self.registered.add
        self.deregister_fd = self.registered.remove

    def extract_mount_point(self, path: str) -> str | None:
        return self.mount

    def make_iovec(self, memory: Any, mount: str) -> memoryview:
        return memoryview(memory.buf)

    def make_ioring(self, mount: str, entries: int, *, for_read: bool) -> Ring:
        return Ring(self)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    client = Client()
    monkeypatch.setitem(sys.modules, "hf3fs_fuse", ModuleType("hf3fs_fuse"))
    monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", client)
    return client


@pytest.fixture
def storage(client: Client, tmp_path: Path) -> Iterator[Hf3fsStorage]:
    with Hf3fsStorage.from_config({"path": str(tmp_path)}) as storage:
        storage.open_space(SPACE)
        yield storage


def test_pages_go_through_it(storage: Hf3fsStorage, client: Client) -> None:
    sources = [page(65536, seed) for seed in range(20)]
    targets = [blank(65536) for _ in range(20)]

    assert [True] * 20 == storage.batch_set(SPACE, HASHES, sources)
    assert [True] * 20 == storage.batch_get(SPACE, HASHES, targets)
    assert [one.tobytes() for one in sources] == [one.tobytes() for one in targets]
    assert 2 == client.moves
    assert set() == client.registered


def test_a_page_that_is_larger_than_its_memory_goes_through_the_mount(
    storage: Hf3fsStorage, client: Client
) -> None:
    large = space(page_nbytes=9 << 20)
    source, target = page(9 << 20), blank(9 << 20)

    assert [True] == storage.batch_set(large, HASHES[:1], [source])
    assert [True] == storage.batch_get(large, HASHES[:1], [target])
    assert source.tobytes() == target.tobytes()
    assert 0 == client.moves


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT])
def test_what_fails_is_a_miss_or_refused(
    storage: Hf3fsStorage, client: Client, number: int
) -> None:
    assert [True] == storage.batch_set(SPACE, HASHES[:1], [page(65536)])
    client.fails = number

    assert [False] == storage.batch_get(SPACE, HASHES[:1], [blank(65536)])
    assert [False] == storage.batch_set(SPACE, HASHES[1:2], [page(65536)])
    client.fails = 0
    assert [True] == storage.batch_get(SPACE, HASHES[:1], [blank(65536)])


def test_elsewhere_than_on_3fs_it_is_not_used(client: Client, tmp_path: Path) -> None:
    client.mount = None
    with Hf3fsStorage.from_config({"path": str(tmp_path)}) as storage:
        assert [True] == storage.batch_set(SPACE, HASHES[:1], [page(65536)])
    assert 0 == client.moves
    with pytest.raises(ConfigError, match="no mount of 3FS"):
        Hf3fsStorage.from_config({"path": str(tmp_path), "usrbio": True})


def test_a_missing_client_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(BackendNotInstalled, match="hf3fs_fuse"):
        Hf3fsStorage.from_config({"path": str(tmp_path), "usrbio": True})
