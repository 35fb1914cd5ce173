"""The `file` backend as a storage: files, batches, damage, scope and settings."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hicache_backends.file import FileStorage
from hicache_backends.file.page_file import TRAILER_NBYTES
from pages import blank, hash_of, page, space
from servers import wait_until

from hicache_storage import ConfigError, Durability, Retention, StorageTimeout, StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.storage import PageTimes

Damage: TypeAlias = Callable[[bytes], bytes]


SPACE = space()
HASHES = [hash_of(number) for number in range(8)]


@pytest.fixture
def storage(root: Path) -> Iterator[FileStorage]:
    with opened(root) as storage:
        storage.open_space(SPACE)
        yield storage


def opened(root: Path, **config: Any) -> FileStorage:
    return FileStorage.from_config({"path": str(root), **config})


def stored(storage: FileStorage, numbers: range) -> None:
    hashes = [hash_of(number) for number in numbers]
    assert [True] * len(hashes) == storage.batch_set(SPACE, hashes, [page(seed=n) for n in numbers])


def file_of(root: Path, key_space: KeySpace, page_hash: str) -> Path:
    return root / "spaces" / key_space.id / page_hash[:2] / page_hash


def got(storage: FileStorage, page_hash: str) -> bytes | None:
    target = blank()
    return target.tobytes() if storage.batch_get(SPACE, [page_hash], [target]) == [True] else None


class TestLayout:
    def test_a_page_lies_at_the_start_of_its_file(self, storage: FileStorage, root: Path) -> None:
        stored(storage, range(1))
        data = file_of(root, SPACE, HASHES[0]).read_bytes()

        assert page().tobytes() == data[:-TRAILER_NBYTES]
        assert b"HiPg" == data[4096:4100]

    def test_the_manifest_is_the_key_space(self, storage: FileStorage, root: Path) -> None:
        manifest = json.loads((root / "spaces" / SPACE.id / "manifest.json").read_text())

        assert SPACE == KeySpace.from_manifest(manifest)

    def test_two_writes_of_one_page_never_share_a_nonce(
        self, storage: FileStorage, root: Path
    ) -> None:
        trailers = set[bytes]()
        for _ in range(3):
            stored(storage, range(1))
            trailers.add(file_of(root, SPACE, HASHES[0]).read_bytes()[-TRAILER_NBYTES:])
            storage.batch_delete(SPACE, HASHES[:1])

        assert 3 == len(trailers)

    def test_a_vanished_key_space_comes_back_with_the_next_set(
        self, storage: FileStorage, root: Path
    ) -> None:
        shutil.rmtree(root / "spaces" / SPACE.id)
        stored(storage, range(2))

        assert [SPACE] == list(storage.spaces())

    def test_a_vanished_writer_directory_comes_back_with_the_next_set(
        self, storage: FileStorage, root: Path
    ) -> None:
        shutil.rmtree(root / "writers")
        stored(storage, range(2))

        assert [True, True] == storage.batch_exists(SPACE, HASHES[:2])

    def test_a_vanished_root_is_unavailable_and_works_again_when_it_is_back(
        self, storage: FileStorage, root: Path
    ) -> None:
        away = root.with_name(root.name + "-away")
        stored(storage, range(1))
        root.rename(away)
        try:
            with pytest.raises(StorageUnavailable):
                storage.batch_set(SPACE, HASHES[1:2], [page()])
            assert [False] == storage.batch_exists(SPACE, HASHES[:1])
        finally:
            away.rename(root)

        assert page().tobytes() == got(storage, HASHES[0])
        stored(storage, range(1, 2))


class TestPages:
    def test_a_present_page_is_not_written_again(self, storage: FileStorage, root: Path) -> None:
        stored(storage, range(1))
        before = file_of(root, SPACE, HASHES[0]).read_bytes()

        assert [True] == storage.batch_set(SPACE, HASHES[:1], [page(seed=99)])
        assert before == file_of(root, SPACE, HASHES[0]).read_bytes()

    @pytest.mark.usefixtures("python_data_plane")
    def test_a_page_costs_few_system_calls(
        self, storage: FileStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The data plane in Python is counted. The compiled one makes the same system calls."""
        stored(storage, range(4))  # their directories are there
        storage.batch_delete(SPACE, HASHES[:4])
        calls = list[str]()
        for name in ("open", "pread", "preadv", "pwritev", "rename", "utime", "close", "stat"):
            real = getattr(os, name)

            def counted(*args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
                calls.append(name)
                return real(*args, **kwargs)

            monkeypatch.setattr(os, name, counted)
        assert [True] == storage.batch_set(SPACE, HASHES[:1], [page()])
        written, calls[:] = list(calls), []
        assert [True] == storage.batch_get(SPACE, HASHES[:1], [blank()])

        assert ["open", "pread", "preadv", "close"] == calls
        page_calls = ["open", "open", "pwritev", "utime", "close", "rename"]
        assert page_calls == [name for name in written if name != "pread"]


def _flipped(data: bytes, offset: int) -> bytes:
    changed = bytearray(data)
    changed[offset] ^= 1
    return bytes(changed)


_DAMAGE: dict[str, Damage] = {
    "short": lambda data: data[:-1],
    "stub": lambda data: data[:100],
    "long": lambda data: data + b"x",
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "bare": lambda data: data[:4096],
    "last-bit": lambda data: _flipped(data, -1),
    "head-bit": lambda data: _flipped(data, 4100),
    "nonce-bit": lambda data: _flipped(data, 4096 + 45),
}


class TestDamage:
    @pytest.mark.parametrize(
        "damage",
        list(_DAMAGE.values()),
        ids=list(_DAMAGE),
    )
    @pytest.mark.parametrize("first", ["get", "set"])
    def test_a_damaged_file_is_a_miss_and_heals(
        self, storage: FileStorage, root: Path, damage: Damage, first: str
    ) -> None:
        stored(storage, range(2))
        path = file_of(root, SPACE, HASHES[0])
        path.write_bytes(damage(path.read_bytes()))
        if first == "get":
            assert None is got(storage, HASHES[0])
            assert not path.exists()
            assert [False] == storage.batch_exists(SPACE, HASHES[:1])
        stored(storage, range(1))

        assert page().tobytes() == got(storage, HASHES[0])
        assert page(seed=1).tobytes() == got(storage, HASHES[1])
        assert 1 == storage.stats().counters["healed"]
        assert 2 * (4096 + TRAILER_NBYTES) == storage.stats().nbytes

    def test_a_page_under_another_name_is_a_miss(self, storage: FileStorage, root: Path) -> None:
        stored(storage, range(2))
        shutil.copy(file_of(root, SPACE, HASHES[0]), file_of(root, SPACE, HASHES[1]))

        assert None is got(storage, HASHES[1])

    def test_a_page_of_another_key_space_is_a_miss(self, storage: FileStorage, root: Path) -> None:
        other = space(revision="other")
        stored(storage, range(1))
        assert [True] == storage.batch_set(other, HASHES[:1], [page(seed=5)])
        shutil.copy(file_of(root, other, HASHES[0]), file_of(root, SPACE, HASHES[0]))

        assert None is got(storage, HASHES[0])

    def test_a_directory_in_a_page_s_place_harms_nobody(
        self, storage: FileStorage, root: Path
    ) -> None:
        file_of(root, SPACE, HASHES[0]).mkdir(parents=True)

        assert [False] == storage.batch_exists(SPACE, HASHES[:1])
        assert None is got(storage, HASHES[0])
        assert [False, True] == storage.batch_set(SPACE, HASHES[:2], [page(), page()])
        assert [False] == storage.batch_delete(SPACE, HASHES[:1])


class TestScope:
    def test_clear_removes_its_pages_and_nothing_else(
        self, storage: FileStorage, root: Path
    ) -> None:
        other = space(pool="draft")
        stored(storage, range(3))
        assert [True] == storage.batch_set(other, HASHES[:1], [page()])
        fan = file_of(root, SPACE, HASHES[0]).parent
        strangers = [
            root / "notes",
            root / "spaces" / "notes",
            root / "spaces" / SPACE.id / "notes",
            fan / "notes",
            fan / ("0" * 64 if fan.name != "00" else "1" * 64),
            root / "writers" / "notes",
        ]
        for path in strangers:
            path.write_text("foreign")

        assert 3 == storage.clear(SPACE)
        assert [] == list(storage.scan(SPACE))
        assert [True] == storage.batch_exists(other, HASHES[:1])
        assert ["foreign"] * len(strangers) == [path.read_text() for path in strangers]

    def test_scan_lists_pages_of_the_right_size_only(
        self, storage: FileStorage, root: Path
    ) -> None:
        stored(storage, range(3))
        os.truncate(file_of(root, SPACE, HASHES[1]), 10)
        (file_of(root, SPACE, HASHES[0]).parent / "notes").write_text("foreign")

        found = sorted(info.page_hash for info in storage.scan(SPACE))
        assert sorted([HASHES[0], HASHES[2]]) == found
        assert {4096} == {info.nbytes for info in storage.scan(SPACE)}


class TestPageTimes:
    def test_a_page_has_the_time_of_its_file(self, storage: FileStorage, root: Path) -> None:
        stored(storage, range(2))
        os.utime(file_of(root, SPACE, HASHES[1]), ns=(5, 1_700_000_000_500_000_000))

        absent, found = storage.page_times(SPACE, [HASHES[5], HASHES[1]])

        assert PageTimes() == absent
        assert PageTimes(written_at_s=1_700_000_000.5) == found

    def test_a_directory_that_is_a_link_has_no_times(
        self, storage: FileStorage, root: Path
    ) -> None:
        stored(storage, range(1))
        directory = file_of(root, SPACE, HASHES[0]).parent
        directory.rename(root / "elsewhere")
        directory.symlink_to(root / "elsewhere")
        with opened(root) as again:
            assert [PageTimes()] == again.page_times(SPACE, HASHES[:1])

    def test_times_that_are_not_there_in_time_are_a_time_out(self, root: Path) -> None:
        with (
            opened(root, timeout_s=1e-9) as storage,
            pytest.raises(StorageTimeout, match="looking at the times of 2 pages"),
        ):
            storage.page_times(SPACE, HASHES[:2])


class TestLifecycle:
    def test_pages_not_begun_in_time_are_misses(self, root: Path) -> None:
        with opened(root, timeout_s=1e-9) as storage:
            assert [False, False] == storage.batch_set(SPACE, HASHES[:2], [page(), page()])
            assert [False, False] == storage.batch_get(SPACE, HASHES[:2], [blank(), blank()])
            assert storage.stats().counters["timeouts"] == 4
            assert 0 == storage.stats().nbytes

    def test_a_lost_ledger_is_found_again(self, storage: FileStorage, root: Path) -> None:
        stored(storage, range(3))
        storage.close()
        for content in (None, b"", b"\xff" * 16, bytes(8) + b"\x01" * 8):
            if content is None:
                (root / "usage").unlink()
            else:
                (root / "usage").write_bytes(content)
            with opened(root) as again:
                wait_until(lambda: again.stats().nbytes == 3 * (4096 + TRAILER_NBYTES))


class TestSettings:
    def test_a_wrong_durability_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="durability"):
            FileStorage.from_config({"path": str(tmp_path), "durability": "fsync"})

    def test_it_declares_what_it_was_configured_for(self, tmp_path: Path) -> None:
        with opened(tmp_path / "a", parallelism=2) as plain:
            assert Retention.UNTIL_DELETED is plain.capabilities.retention
            assert Durability.CRASH is plain.capabilities.durability
            assert (1, 2) == (plain.capabilities.alignment, plain.capabilities.parallelism)
        with opened(tmp_path / "b", min_free_nbytes="1MiB", durability="power") as narrow:
            assert Retention.UNTIL_PRESSURE is narrow.capabilities.retention
            assert Durability.POWER is narrow.capabilities.durability
