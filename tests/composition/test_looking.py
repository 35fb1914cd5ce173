"""Compositions that a program only looks at, with a store that is missing or does not answer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_stores import save
from composed_stores import file_member

from hicache_storage.errors import NoSuchStore, StorageUnavailable
from hicache_storage.registry import open_storage


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """Return a `striped` config of two stores of files with pages."""
    found = {"stripes": [file_member(name, tmp_path / name) for name in "ab"]}
    with open_storage("striped", found) as storage:
        save(storage, range(16))
    return found


def test_if_no_store_exists_none_is_made(tmp_path: Path) -> None:
    config = {"stripes": [file_member(name, tmp_path / name) for name in "ab"]}

    with pytest.raises(NoSuchStore, match=f"no store at {tmp_path}/a and {tmp_path}/b"):
        open_storage("striped", config, read_only=True)

    assert not [*tmp_path.iterdir()]


def test_the_listing_names_the_store_that_is_missing(
    config: dict[str, Any], tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "b")

    with (
        open_storage("striped", config, read_only=True) as storage,
        pytest.raises(StorageUnavailable, match=f"^stripe 'b': there is no store at {tmp_path}/b"),
    ):
        list(storage.spaces())

    assert not (tmp_path / "b").exists()


def test_the_other_stores_can_be_looked_at(config: dict[str, Any], tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "b")

    with open_storage("striped", config, read_only=True) as storage:
        (space,) = storage.parts()["a"].spaces()
        assert [*storage.parts()["a"].scan(space)]


def test_a_store_that_cannot_be_reached_gives_its_reason(tmp_path: Path) -> None:
    redis = {"name": "rack", "backend": "redis", "config": {"url": "redis://127.0.0.1:1/0"}}
    nvme = file_member("nvme", tmp_path / "nvme")
    config = {"tiers": [nvme, redis]}
    with open_storage("file", nvme["config"]) as storage:
        save(storage, range(1))

    with (
        open_storage("tiered", config, read_only=True) as storage,
        pytest.raises(StorageUnavailable, match=r"^tier 'rack': redis: "),
    ):
        list(storage.spaces())


def test_a_store_that_fails_does_not_hide_the_figures_of_the_others(
    config: dict[str, Any], tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "b")

    with open_storage("striped", config, read_only=True) as storage:
        assert {"a": "closed", "b": "closed"} == storage.stats().part_states


@pytest.mark.parametrize("backend", ["tiered", "encrypted"])
def test_a_store_that_is_missing_changes_no_claim(tmp_path: Path, backend: str) -> None:
    """Otherwise the others' pages would be looked for under frames that nobody writes."""
    disk = file_member("disk", tmp_path / "disk")
    disk["config"]["durability"] = "power"
    (key := tmp_path / "key").write_text("5e" * 32)
    sealed = {"backend": "file", "config": disk["config"], "keys": {"k": {"file": str(key)}}}
    below = {"name": "disk", "backend": "encrypted", "config": {**sealed, "current_key": "k"}}
    nested = {"tiers": [disk if backend == "tiered" else below, file_member("y", tmp_path / "y")]}
    tiers = [{"name": "n", "backend": "tiered", "config": nested}, file_member("x", tmp_path / "x")]
    with open_storage("tiered", {"tiers": tiers}) as storage:
        claimed = storage.capabilities
    shutil.rmtree(tmp_path / "disk")

    with open_storage("tiered", {"tiers": tiers}, read_only=True) as storage:
        assert claimed == storage.capabilities
