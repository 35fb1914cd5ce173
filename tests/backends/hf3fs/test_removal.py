"""The removal of key spaces from `hf3fs`, with both indexes, beside writers and foreign files."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hf3fs_roots import HASHES, NBYTES, SLOT_NBYTES, SPACE, counted, hits, opened, stored
from pages import page, space
from servers import RedisServer

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import StorageUnavailable

PAGES = range(20)
OTHER = space(model="other", page_nbytes=NBYTES)


@pytest.fixture(params=["sqlite", "redis"])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[dict[str, Any]]:
    """Return the field of the config that names the index."""
    if request.param == "sqlite":
        yield {}
        return
    with RedisServer(tmp_path / "redis") as server:
        yield {"index": server.url, "timeout_s": 20}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "root"


def directory(place: Path) -> Path:
    return place / "spaces" / SPACE.id


@pytest.mark.parametrize("content", [None, '{"model":'], ids=["missing", "damaged"])
def test_an_unreadable_one_is_listed_and_removed(
    place: Path, index: dict[str, Any], content: str | None
) -> None:
    with opened(place, **index) as storage:
        stored(storage, PAGES)
        storage.batch_set(OTHER, HASHES[:1], [page(NBYTES)])
        manifest = directory(place) / "manifest.json"
        manifest.unlink()
        if content is not None:
            manifest.write_text(content)

        assert [SPACE.id] == [one.space_id for one in storage.unreadable_spaces()]
        assert 20 == storage.remove_space(SPACE.id)
        assert [] == list(storage.unreadable_spaces())
        assert [OTHER] == list(storage.spaces())
    assert not directory(place).exists()
    with opened(place, **index) as storage:
        assert SLOT_NBYTES == storage.stats().nbytes


def test_a_readable_one_is_removed_with_its_files(place: Path, index: dict[str, Any]) -> None:
    with opened(place, **index) as storage:
        stored(storage, PAGES)

        assert 20 == storage.remove_space(SPACE.id)
        assert [] == list(storage.spaces())
        assert not directory(place).exists()


def test_an_engine_that_had_it_open_stores_pages_there_again(
    place: Path, index: dict[str, Any]
) -> None:
    with opened(place, **index) as engine, opened(place, **index) as operator:
        stored(engine, PAGES)
        operator.remove_space(SPACE.id)
        stored(engine, PAGES)

        assert [True] * 20 == hits(engine, PAGES)
        assert [SPACE] == list(operator.spaces())
        assert 20 * SLOT_NBYTES == engine.stats().nbytes


def test_a_writer_with_slots_keeps_it(place: Path, index: dict[str, Any]) -> None:
    with opened(place, **index) as engine, opened(place, **index) as operator:
        stored(engine, PAGES)
        files = engine._files_of(SPACE)
        engine._mount.get().index.reserve(files, 2, Deadline(20))

        assert 20 == operator.remove_space(SPACE.id)
        assert [SPACE] == list(operator.spaces())
        stored(engine, PAGES)
        assert [True] * 20 == hits(operator, PAGES)


def test_pages_that_come_after_the_clear_keep_it(
    place: Path, index: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(place, **index) as engine, opened(place, **index) as operator:
        stored(engine, PAGES)
        mount = operator._mount.get()
        real = mount.clear

        def clear(*args: Any) -> int:
            removed = real(*args)
            stored(engine, range(30, 32))
            return removed

        monkeypatch.setattr(mount, "clear", clear)

        assert 20 == operator.remove_space(SPACE.id)
        assert [True] * 2 == hits(operator, range(30, 32))


def test_pages_that_come_while_files_are_removed_stay(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index in Redis can't make writers wait, so slots that are taken meanwhile are in new files."""
    with RedisServer(tmp_path / "redis") as server:
        config = {"index": server.url, "timeout_s": 20}
        with opened(place, **config) as engine, opened(place, **config) as operator:
            stored(engine, PAGES)
            layout = type(operator._layout)
            real = layout.remove_slots

            def remove_slots(*args: Any) -> None:
                stored(engine, range(30, 32))
                real(*args)

            monkeypatch.setattr(layout, "remove_slots", remove_slots)

            assert 20 == operator.remove_space(SPACE.id)
            assert [True] * 2 == hits(operator, range(30, 32))
            assert [SPACE] == list(operator.spaces())
            stored(engine, PAGES)
            assert [True] * 20 == hits(operator, PAGES)


def test_files_of_other_programs_stay_and_are_named(place: Path, index: dict[str, Any]) -> None:
    with opened(place, **index) as storage:
        stored(storage, PAGES)
        (directory(place) / "notes").write_text("precious")
        with pytest.raises(StorageUnavailable, match="notes"):
            storage.remove_space(SPACE.id)

        assert "precious" == (directory(place) / "notes").read_text()
        assert [SPACE] == list(storage.spaces())
        stored(storage, PAGES)
        assert [True] * 20 == hits(storage, PAGES)


def test_nothing_behind_a_link_is_touched(
    place: Path, index: dict[str, Any], tmp_path: Path
) -> None:
    with opened(place, **index) as storage:
        stored(storage, PAGES)
        shutil.move(directory(place), tmp_path / "elsewhere")
        directory(place).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StorageUnavailable, match="symbolic link"):
            storage.remove_space(SPACE.id)

    assert (tmp_path / "elsewhere" / "slots-0000").exists()


@pytest.mark.parametrize("space_id", ["0" * 32, "../../etc"])
def test_an_unknown_one_gives_none(place: Path, index: dict[str, Any], space_id: str) -> None:
    with opened(place, **index) as storage:
        stored(storage, PAGES)

        assert 0 == storage.remove_space(space_id)
        assert [True] * 20 == hits(storage, PAGES)


def test_its_rows_leave_the_sqlite_index(place: Path) -> None:
    with opened(place) as storage:
        stored(storage, PAGES)
        storage.remove_space(SPACE.id)
        stored(storage, range(1))

    assert (0, 1, 0) == counted(place)
