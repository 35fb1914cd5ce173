"""The removal of key spaces from `file`, beside writers and foreign files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from file_roots import FILE_NBYTES, HASHES, SPACE, file_of, is_right, opened, put, there
from hicache_backends.file import FileStorage
from pages import page, space

from hicache_storage.errors import StorageUnavailable

DIRECTORY = Path("spaces") / SPACE.id


def manifest(root: Path) -> Path:
    return root / DIRECTORY / "manifest.json"


@contextmanager
def filled(root: Path) -> Generator[FileStorage]:
    """Open a storage with page 0. Storages that open a root with pages do not scan it."""
    with opened(root) as storage:
        put(storage, 0)
        yield storage


def spoil_missing(path: Path) -> None:
    path.unlink()


def spoil_damaged(path: Path) -> None:
    path.write_text('{"model":')


def spoil_other(path: Path) -> None:
    other = space(model="other")
    with opened(path.parents[2]) as storage:
        storage.open_space(other)
    path.write_bytes((path.parents[1] / other.id / "manifest.json").read_bytes())


SPOILT: dict[str, Callable[[Path], None]] = {
    "lost": spoil_missing,
    "damaged": spoil_damaged,
    "that of key space": spoil_other,
}


@pytest.mark.parametrize("reason", SPOILT)
class TestUnreadable:
    def test_it_is_listed_with_its_reason(self, root: Path, reason: str) -> None:
        with opened(root) as storage:
            put(storage, *range(3))
            SPOILT[reason](manifest(root))
            (found,) = storage.unreadable_spaces()

        assert SPACE.id == found.space_id
        assert reason in found.reason

    def test_it_can_be_removed(self, root: Path, reason: str) -> None:
        with opened(root) as storage:
            put(storage, *range(3))
            SPOILT[reason](manifest(root))

            assert 3 == storage.remove_space(SPACE.id)
            assert [] == list(storage.unreadable_spaces())
            assert 0 == storage.stats().nbytes
        assert not (root / DIRECTORY).exists()


def test_a_readable_key_space_is_removed_with_its_manifest_and_its_bytes(root: Path) -> None:
    other = space(model="other")
    with opened(root, 100) as storage:
        storage.batch_set(other, HASHES[:1], [page()])
        put(storage, *range(20))
        os.truncate(file_of(root, 0), 100)

        assert 19 == storage.remove_space(SPACE.id)
        assert [other] == list(storage.spaces())
        assert FILE_NBYTES == storage.stats().nbytes
    assert not (root / DIRECTORY).exists()


@pytest.mark.parametrize("space_id", ["0" * 32, "../../etc", ""])
def test_an_unknown_one_gives_none(root: Path, space_id: str) -> None:
    with opened(root) as storage:
        put(storage, 0)

        assert 0 == storage.remove_space(space_id)
        assert [0] == there(storage)


def test_an_engine_that_had_it_open_stores_pages_there_again(root: Path) -> None:
    with opened(root, 100) as engine, opened(root, 100) as operator:
        put(engine, *range(20))
        operator.remove_space(SPACE.id)

        assert [True] * 20 == engine.batch_set(
            SPACE, HASHES[:20], [page(seed=n) for n in range(20)]
        )
        assert all(is_right(engine, n) for n in range(20))
        assert [SPACE] == list(operator.spaces())


@pytest.mark.parametrize("call", ["rmdir", "unlink"])
def test_a_page_that_comes_meanwhile_keeps_the_key_space(
    root: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is set right before the last but one step of the removal, or before the last one."""
    with filled(root) as engine, opened(root) as operator:
        engine.clear(SPACE)
        real = getattr(os, call)

        def late(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(os, call, real)
            put(engine, 1)
            return real(*args, **kwargs)

        monkeypatch.setattr(os, call, late)

        assert 0 == operator.remove_space(SPACE.id)
        assert is_right(engine, 1)
        assert [SPACE] == list(operator.spaces())


def test_an_engine_that_opens_it_between_the_last_steps_keeps_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(root) as engine, opened(root) as operator:
        engine.clear(SPACE)
        real = os.rmdir

        def late(path: str) -> None:
            if path.endswith(SPACE.id):
                monkeypatch.setattr(os, "rmdir", real)
                engine.open_space(SPACE)
            real(path)

        monkeypatch.setattr(os, "rmdir", late)

        assert 0 == operator.remove_space(SPACE.id)
        assert [SPACE] == list(operator.spaces())


@pytest.mark.parametrize("place", ["notes", f"{HASHES[0][:2]}/notes", "manifest.json.d"])
def test_files_of_other_programs_stay_and_are_named(root: Path, place: str) -> None:
    with opened(root) as storage:
        put(storage, *range(3))
        (root / DIRECTORY / place).write_text("precious")
        with pytest.raises(StorageUnavailable, match=place.rpartition("/")[2]):
            storage.remove_space(SPACE.id)

        assert "precious" == (root / DIRECTORY / place).read_text()
        assert [SPACE] == list(storage.spaces())


def test_nothing_behind_a_link_is_touched(root: Path, tmp_path: Path) -> None:
    with opened(root) as storage:
        put(storage, *range(3))
        shutil.move(root / DIRECTORY, tmp_path / "elsewhere")
        (root / DIRECTORY).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StorageUnavailable, match="symbolic link"):
            storage.remove_space(SPACE.id)

    assert 3 == len(list((tmp_path / "elsewhere").glob("??/*")))
