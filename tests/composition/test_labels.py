"""Stripes whose disks are exchanged, unmounted, wiped, copied or foreign."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import composed_stores
import pytest
from composed_stores import SPACE, file_member
from hicache_backends.file import FileStorage
from servers import wait_until

from hicache_storage.errors import StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.registry import open_storage
from hicache_storage.storage import HiCacheStorage

ALL = [True] * 64


def config_of(root: Path, names: str = "ab", **fields: Any) -> dict[str, Any]:
    stripes = [file_member(name, root / name) for name in names]
    return {"stripes": stripes, "breaker_cooldown_s": 0.05, **fields}


def opened(root: Path, names: str = "ab", **fields: Any) -> HiCacheStorage:
    return open_storage("striped", config_of(root, names, **fields))


def looked_at(root: Path, names: str = "ab") -> HiCacheStorage:
    return open_storage("striped", config_of(root, names), read_only=True)


def fill(root: Path, names: str = "ab", **fields: Any) -> None:
    with opened(root, names, **fields) as storage:
        assert save(storage) == ALL


def save(storage: HiCacheStorage) -> list[bool]:
    return composed_stores.save(storage, 64)


def load(storage: HiCacheStorage) -> list[bool]:
    return composed_stores.load(storage, 64)


def exchange(root: Path, one: str, other: str) -> None:
    """Exchange two disks, as if their mount points were."""
    (root / one).rename(root / "away")
    (root / other).rename(root / one)
    (root / "away").rename(root / other)


def unmount(root: Path, name: str) -> None:
    """Leave an empty mount point."""
    (root / name).rename(root / f"{name}-disk")
    (root / name).mkdir()


def mount(root: Path, name: str) -> None:
    (root / name).rmdir()
    (root / f"{name}-disk").rename(root / name)


def labels(storage: HiCacheStorage) -> dict[str, str]:
    found = {one.topic: one.fact for one in storage.diagnose()}
    return {topic: fact for topic, fact in found.items() if topic.endswith(": label")}


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*"))


@pytest.mark.parametrize("fields", [{}, {"weights": {"a": 1, "b": 3}}])
def test_disks_that_are_exchanged_keep_their_pages(tmp_path: Path, fields: dict[str, Any]) -> None:
    fill(tmp_path, **fields)
    exchange(tmp_path, "a", "b")

    with opened(tmp_path, **fields) as storage:
        assert load(storage) == ALL
        assert labels(storage) == {
            "a: label": "there is the store 'b'",
            "b: label": "there is the store 'a'",
        }
        assert save(storage) == ALL
        assert 64 == sum(1 for part in storage.parts().values() for _ in part.scan(SPACE))


def test_a_disk_keeps_its_pages_under_another_name(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "b").rename(tmp_path / "c")

    with opened(tmp_path, "ac") as storage:
        assert load(storage) == ALL
        assert labels(storage) == {"c: label": "there is the store 'b'"}


def test_a_disk_that_is_not_mounted_is_not_filled_and_taken_in_later(tmp_path: Path) -> None:
    fill(tmp_path)
    unmount(tmp_path, "b")

    with opened(tmp_path) as storage:
        hits = load(storage)
        assert {True, False} == set(hits)
        assert hits == save(storage)
        assert {"a": "closed", "b": "absent"} == storage.stats().part_states
        assert [] == files(tmp_path / "b")
        with pytest.raises(
            StorageUnavailable, match=f"^stripe 'b': there is no store at {tmp_path}"
        ):
            list(storage.spaces())

        mount(tmp_path, "b")
        wait_until(lambda: load(storage) == ALL)


def test_another_disk_does_not_come_in_place_of_a_missing_one(tmp_path: Path) -> None:
    fill(tmp_path, "abc")
    unmount(tmp_path, "b")
    with opened(tmp_path, "abc") as storage:
        hits = load(storage)
        (tmp_path / "b").rmdir()
        shutil.copytree(tmp_path / "c", tmp_path / "b")

        def refused() -> bool:
            assert hits == save(storage)
            return any(
                "there is the store 'c' instead of 'b'" in one.fact for one in storage.diagnose()
            )

        wait_until(refused)


def test_a_new_disk_is_used_when_it_is_said_to_be_new(tmp_path: Path) -> None:
    fill(tmp_path)
    shutil.rmtree(tmp_path / "b")
    with opened(tmp_path) as storage:
        assert ALL != save(storage)
        advice = f"make the directory {tmp_path}/b/spaces"
        with pytest.raises(StorageUnavailable) as caught:
            storage.parts()["b"].stats()
        assert caught.value.advice is not None
        assert advice in caught.value.advice

    (tmp_path / "b" / "spaces").mkdir(parents=True)

    fill(tmp_path)


def test_a_new_stripe_is_made(tmp_path: Path) -> None:
    fill(tmp_path)

    fill(tmp_path, "abc")

    unmount(tmp_path, "c")
    with opened(tmp_path, "abc") as storage:
        assert "absent" == storage.stats().part_states["c"]


def test_a_disk_of_another_composition_is_not_used(tmp_path: Path) -> None:
    fill(tmp_path)
    fill(tmp_path / "other", "xy")
    unmount(tmp_path, "b")
    (tmp_path / "b").rmdir()
    (tmp_path / "other" / "x").rename(tmp_path / "b")
    before = files(tmp_path / "b")

    with opened(tmp_path) as storage:
        assert {"a": "closed", "b": "absent"} == storage.stats().part_states
        assert ALL != load(storage)
    with (
        looked_at(tmp_path) as storage,
        pytest.raises(StorageUnavailable, match="there is the store 'x' of another composition"),
    ):
        list(storage.spaces())
    assert before == files(tmp_path / "b")


def test_a_required_disk_of_another_composition_ends_the_opening(tmp_path: Path) -> None:
    fill(tmp_path)
    fill(tmp_path / "other", "xy")
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "other" / "x").rename(tmp_path / "b")
    config = config_of(tmp_path)
    config["stripes"][1]["required"] = True

    with pytest.raises(StorageUnavailable, match=r"^striped: stripes.b: there is the store 'x'"):
        open_storage("striped", config)


def test_a_disk_whose_labels_cannot_be_read_is_not_taken_for_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be any of them, so it gets no label, and is used when it can be read."""
    fill(tmp_path)
    exchange(tmp_path, "a", "b")
    before = sorted(tmp_path.glob("*/spaces/*"))
    read, failing = FileStorage.spaces, {str(tmp_path / "a")}

    def spaces(storage: FileStorage) -> Iterator[KeySpace]:
        if str(storage._settings.path) in failing:
            raise StorageUnavailable("the disk hangs")
        return read(storage)

    monkeypatch.setattr(FileStorage, "spaces", spaces)
    with opened(tmp_path) as storage:
        assert "absent" == storage.stats().part_states["a"]
        assert ALL != load(storage)

        failing.clear()
        wait_until(lambda: load(storage) == ALL)
    assert before == sorted(tmp_path.glob("*/spaces/*"))


def test_an_opening_lists_each_stripe_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, listed = FileStorage.spaces, list[FileStorage]()

    def spaces(storage: FileStorage) -> Iterator[KeySpace]:
        listed.append(storage)
        return read(storage)

    monkeypatch.setattr(FileStorage, "spaces", spaces)
    opened(tmp_path).close()
    opened(tmp_path).close()

    assert 4 == len(listed)


def test_a_copy_of_a_disk_is_named(tmp_path: Path) -> None:
    fill(tmp_path)
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(tmp_path / "b", tmp_path / "a")

    with opened(tmp_path) as storage:
        assert labels(storage) == {"a: label": "there is a copy of the store 'b'"}
        assert save(storage) == ALL == load(storage)


def test_stores_of_an_earlier_release_are_labelled(tmp_path: Path) -> None:
    for name in "ab":
        open_storage("file", {"path": str(tmp_path / name)}).close()

    fill(tmp_path)
    exchange(tmp_path, "a", "b")

    with opened(tmp_path) as storage:
        assert load(storage) == ALL


def test_who_only_looks_writes_no_label(tmp_path: Path) -> None:
    for name in "ab":
        open_storage("file", {"path": str(tmp_path / name)}).close()
    before = files(tmp_path)

    with looked_at(tmp_path) as storage:
        assert not load(storage)[0]

    assert before == files(tmp_path)


def test_who_only_looks_sees_exchanged_disks(tmp_path: Path) -> None:
    fill(tmp_path)
    exchange(tmp_path, "a", "b")
    before = files(tmp_path)

    with looked_at(tmp_path) as storage:
        assert load(storage) == ALL
        assert ["a: label", "b: label"] == [*labels(storage)]

    assert before == files(tmp_path)


def test_labels_are_no_key_spaces(tmp_path: Path) -> None:
    fill(tmp_path)

    with opened(tmp_path) as storage:
        assert [SPACE] == [*storage.spaces()]
        for part in storage.parts().values():
            assert [SPACE] == [*part.spaces()]
