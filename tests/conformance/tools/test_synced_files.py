"""A power cut leaves what was synced: names of synced directories, bytes of synced files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hicache_conformance import SyncedFiles

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    for name in ("fsync", "fdatasync"):  # `watch` replaces them
        monkeypatch.setattr(os, name, getattr(os, name))
    monkeypatch.setattr(SyncedFiles, "watched", {})
    SyncedFiles(root).watch()
    return root


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def files_in(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_a_synced_file_in_a_synced_directory_stays(root: Path) -> None:
    (root / "pages").mkdir()
    (root / "pages" / "one").write_bytes(b"page")
    for path in (root / "pages" / "one", root / "pages", root):
        sync(path)

    SyncedFiles(root).restore()

    assert {"pages/one": b"page"} == files_in(root)


def test_what_was_not_synced_is_gone(root: Path) -> None:
    (root / "one").write_bytes(b"page")

    SyncedFiles(root).restore()

    assert {} == files_in(root)


def test_a_synced_name_without_synced_bytes_is_an_empty_file(root: Path) -> None:
    (root / "one").write_bytes(b"page")
    sync(root)

    SyncedFiles(root).restore()

    assert {"one": b""} == files_in(root)


def test_a_synced_file_has_its_old_name_until_the_directory_is_synced(root: Path) -> None:
    (root / "temp").write_bytes(b"page")
    sync(root / "temp")
    sync(root)
    (root / "temp").rename(root / "one")

    SyncedFiles(root).restore()

    assert {"temp": b"page"} == files_in(root)


def test_the_bytes_of_the_last_sync_stay(root: Path) -> None:
    (root / "one").write_bytes(b"old")
    sync(root / "one")
    sync(root)
    (root / "one").write_bytes(b"new, longer")

    SyncedFiles(root).restore()

    assert {"one": b"old"} == files_in(root)


def test_what_a_power_cut_left_is_still_there_after_the_next(root: Path) -> None:
    (root / "one").write_bytes(b"page")
    sync(root / "one")
    sync(root)
    SyncedFiles(root).restore()

    SyncedFiles(root).restore()

    assert {"one": b"page"} == files_in(root)


def test_files_elsewhere_are_left_alone(root: Path) -> None:
    elsewhere = root.with_name("elsewhere")
    elsewhere.write_bytes(b"other")
    sync(elsewhere)

    SyncedFiles(root).restore()

    assert b"other" == elsewhere.read_bytes()
