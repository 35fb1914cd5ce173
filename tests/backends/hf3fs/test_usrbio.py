"""Transfers through 3FS's own client, against a stand-in of its documented interface.

A real 3FS needs a cluster with RDMA hardware. These tests prove only that the calls fit the interface.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hicache_backends.hf3fs import Hf3fsStorage, mount, usrbio, writer
from pages import blank, hash_of, page, space

from hicache_storage import BackendNotInstalled, ConfigError
from hicache_storage.backend_support.revocable import AtomicRevocable

SPACE = space(page_nbytes=65536)
HASHES = [hash_of(number) for number in range(20)]


class Ring:
    """A ring that moves bytes while its caller waits, or later if the wait timed out, as 3FS's does."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._prepared: list[tuple[memoryview, bool, int, int]] = []

    def prepare(self, vector: memoryview, reading: bool, descriptor: int, offset: int) -> None:  # noqa: FBT001
        assert descriptor in self._client.registered
        assert not self._prepared
        self._prepared.append((vector, reading, os.dup(descriptor), offset))

    def submit(self) -> Ring:
        return self

    def wait(self, *, min_results: int, timeout: object) -> list[Any]:
        assert min_results == len(self._prepared)
        if self._client.fails == errno.ETIMEDOUT:
            return []
        prepared, self._prepared = self._prepared, []
        return [self._ended(*each) for each in prepared]

    def _ended(self, vector: memoryview, reading: bool, descriptor: int, offset: int) -> Any:  # noqa: FBT001
        try:
            if self._client.fails:
                return _Result(-self._client.fails)
            self._client.moves += 1
            by = os.preadv if reading else os.pwritev
            return _Result(by(descriptor, [vector], offset))
        finally:
            os.close(descriptor)


class _Result(SimpleNamespace):
    def __init__(self, result: int) -> None:
        super().__init__(result=result)


class Client(ModuleType):
    """The part of `hf3fs_fuse.io` that the backend uses."""

    def __init__(self) -> None:
        super().__init__("hf3fs_fuse.io")
        self.registered: set[int] = set()
        self.moves = 0
        self.lanes = 0
        self.breaks = False
        self.fails = 0
        self.mount: str | None = "/3fs"
        self.register_fd = self.registered.add
        self.deregister_fd = self.registered.remove

    def extract_mount_point(self, path: str) -> str | None:
        return self.mount

    def make_iovec(self, memory: Any, mount: str) -> memoryview:
        if self.breaks:
            raise RuntimeError("no more memory can be registered")
        self.lanes += 1
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


def test_a_page_that_was_revoked_is_neither_stored_nor_read(
    storage: Hf3fsStorage, client: Client
) -> None:
    revocable = AtomicRevocable()
    sources, targets = ([page(65536, seed) for seed in range(2)] for _ in range(2))
    for one in (*sources, *targets):
        one.revocable = revocable
    assert [True] * 2 == storage.batch_set(SPACE, HASHES[:2], sources)
    assert [True] * 2 == storage.batch_get(SPACE, HASHES[:2], targets)
    revocable.revoke()
    moves = client.moves

    assert [False] * 2 == storage.batch_set(SPACE, HASHES[2:4], sources)
    assert [False] * 2 == storage.batch_get(SPACE, HASHES[:2], targets)
    assert moves == client.moves == 2


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
def test_a_failed_transfer_is_a_miss_or_refused(
    storage: Hf3fsStorage, client: Client, number: int
) -> None:
    assert [True] == storage.batch_set(SPACE, HASHES[:1], [page(65536)])
    client.fails = number

    assert [False] == storage.batch_get(SPACE, HASHES[:1], [blank(65536)])
    assert [False] == storage.batch_set(SPACE, HASHES[1:2], [page(65536)])
    client.fails = 0
    assert [True] == storage.batch_get(SPACE, HASHES[:1], [blank(65536)])


def test_a_write_that_lands_late_lands_in_no_other_page(
    storage: Hf3fsStorage, client: Client
) -> None:
    client.fails = errno.ETIMEDOUT
    assert [False] == storage.batch_set(SPACE, HASHES[:1], [page(65536, seed=1)])
    client.fails = 0
    # The stand-in writes when the next call looks for transfers that have ended.
    assert [True] == storage.batch_set(SPACE, HASHES[1:3], [page(65536, n) for n in (2, 3)])[:1]
    target = blank(65536)

    assert [True] == storage.batch_get(SPACE, HASHES[1:2], [target])
    assert page(65536, seed=2).tobytes() == target.tobytes()
    assert 3 == client.moves
    assert [False] == storage.batch_exists(SPACE, HASHES[:1])


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT])
def test_a_slot_whose_write_is_in_doubt_is_no_other_page_s_until_the_writer_ends(
    storage: Hf3fsStorage,
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    client.fails = number
    assert [False] * 4 == storage.batch_set(SPACE, HASHES[:4], [page(65536)] * 4)
    client.fails = 0
    assert [True] * 4 == storage.batch_set(SPACE, HASHES[:4], [page(65536)] * 4)
    assert {0, 1, 2, 3} == slots(tmp_path, "reserved")
    assert {4, 5, 6, 7} == slots(tmp_path, "pages")
    storage.close()
    monkeypatch.setattr(writer, "_MISSING_NS", 0)  # as if it had ended ten minutes ago
    with Hf3fsStorage.from_config({"path": str(tmp_path)}) as again:
        assert [True] == again.batch_set(SPACE, HASHES[8:9], [page(65536)])

    assert set() == slots(tmp_path, "reserved")


def test_too_many_writes_in_doubt_end_the_sets_and_evict_nothing(
    storage: Hf3fsStorage, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mount, "_MOST_IN_DOUBT", 8)
    assert [True] == storage.batch_set(SPACE, HASHES[:1], [page(65536)])
    client.fails = errno.EIO
    for _ in range(3):
        assert [False] * 4 == storage.batch_set(SPACE, HASHES[4:8], [page(65536)] * 4)
    client.fails = 0
    assert [False] == storage.batch_set(SPACE, HASHES[4:5], [page(65536)])
    assert 1 == storage.stats().counters["refused_in_doubt"]
    assert [True] == storage.batch_get(SPACE, HASHES[:1], [blank(65536)])

    storage._mount.get()._in_doubt._lease_s = 0.0  # as if a lease had passed
    assert [True] == storage.batch_set(SPACE, HASHES[4:5], [page(65536)])


def test_channels_are_idle_again_once_their_transfers_have_ended(
    storage: Hf3fsStorage, client: Client
) -> None:
    for _ in range(3):
        client.fails = errno.ETIMEDOUT
        for number in range(5):
            assert [False] == storage.batch_get(SPACE, HASHES[:1], [blank(65536)])
            assert [False] == storage.batch_set(SPACE, HASHES[number : number + 1], [page(65536)])
        client.fails = 0
        assert [True] == storage.batch_set(SPACE, HASHES[:1], [page(65536)])
        storage.batch_delete(SPACE, HASHES[:1])

    assert 6 >= client.lanes


def test_a_3fs_that_does_not_answer_is_handed_no_more_than_it_may_hold(
    storage: Hf3fsStorage, client: Client
) -> None:
    client.fails = errno.ETIMEDOUT
    for _ in range(30):
        assert [False] == storage.batch_set(SPACE, HASHES[:1], [page(65536)])
    assert 16 == client.lanes
    client.fails = 0

    assert [True] == storage.batch_set(SPACE, HASHES[:1], [page(65536)])


def test_an_error_of_the_client_costs_one_page(
    storage: Hf3fsStorage, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    class Noted(SharedMemory):
        def __init__(self, *arguments: Any, **fields: Any) -> None:
            super().__init__(*arguments, **fields)
            made.append(self.name)

    monkeypatch.setattr(usrbio, "SharedMemory", Noted)
    client.breaks = True
    assert [False] == storage.batch_set(SPACE, HASHES[:1], [page(65536)])
    assert [False] == [Path("/dev/shm", name).exists() for name in made]
    client.breaks = False

    assert [True] == storage.batch_set(SPACE, HASHES[:1], [page(65536)])


def slots(root: Path, table: str) -> set[int]:
    """Return the slots that a table of the index names."""
    with closing(sqlite3.connect(root / "index.sqlite")) as db:
        return {row[0] for row in db.execute(f"SELECT slot FROM {table}")}  # noqa: S608 - ours


def test_elsewhere_than_on_3fs_it_is_not_used(client: Client, tmp_path: Path) -> None:
    client.mount = None
    with Hf3fsStorage.from_config({"path": str(tmp_path)}) as storage:
        assert [True] == storage.batch_set(SPACE, HASHES[:1], [page(65536)])
    assert 0 == client.moves
    with pytest.raises(ConfigError, match="not on a mount of 3FS"):
        Hf3fsStorage.from_config({"path": str(tmp_path), "usrbio": True})


def test_a_missing_client_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(BackendNotInstalled, match="hf3fs_fuse"):
        Hf3fsStorage.from_config({"path": str(tmp_path), "usrbio": True})
