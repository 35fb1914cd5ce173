"""A root that holds the store of another backend is recognized by its files, and left unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from hicache_backends.file.layout import Layout as FileLayout
from hicache_backends.hf3fs.layout import Layout as Hf3fsLayout
from looks import snapshot
from pages import hash_of, page, space

from hicache_storage.errors import ConfigError
from hicache_storage.registry import open_storage

SPACE = space()
OTHER = {"file": "hf3fs", "hf3fs": "file"}
SIGNS = {"file": ["usage", "survey"], "hf3fs": ["index.sqlite", "lock"]}


def fill(backend: str, root: Path) -> None:
    with open_storage(backend, {"path": str(root)}) as storage:
        storage.open_space(SPACE)
        assert [True] == storage.batch_set(SPACE, [hash_of(0)], [page()])


def is_there(backend: str, root: Path) -> bool:
    with open_storage(backend, {"path": str(root)}) as storage:
        return storage.batch_exists(SPACE, [hash_of(0)]) == [True]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.mark.parametrize("backend", OTHER)
def test_it_is_refused_and_nothing_is_written(root: Path, backend: str) -> None:
    fill(backend, root)
    before = snapshot(root)
    for read_only in (True, False):
        with pytest.raises(ConfigError, match=f"is a store of the backend {backend}: choose"):
            open_storage(OTHER[backend], {"path": str(root)}, read_only=read_only)

    assert before == snapshot(root)


@pytest.mark.parametrize("backend", OTHER)
def test_one_that_another_backend_opened_by_mistake_is_known_by_its_pages(
    root: Path, tmp_path: Path, backend: str
) -> None:
    """Earlier releases allowed two backends to open the same root."""
    fill(backend, root)
    with open_storage(OTHER[backend], {"path": str(tmp_path / "other")}):
        pass
    for sign in SIGNS[OTHER[backend]]:
        if (tmp_path / "other" / sign).exists():
            (tmp_path / "other" / sign).rename(root / sign)

    with pytest.raises(ConfigError, match=f"store of the backend {backend}"):
        open_storage(OTHER[backend], {"path": str(root)})
    if backend == "file":
        assert is_there(backend, root)


@pytest.mark.parametrize("backend", OTHER)
def test_one_without_its_signs_is_known_by_its_pages(root: Path, backend: str) -> None:
    fill(backend, root)
    for sign in SIGNS[backend]:
        (root / sign).unlink(missing_ok=True) if sign != "survey" else None
    with pytest.raises(ConfigError, match=f"store of the backend {backend}"):
        open_storage(OTHER[backend], {"path": str(root)})

    assert is_there(backend, root)


@pytest.mark.parametrize("name", ["lock", "usage", "root-id"])
def test_a_file_of_another_program_by_that_name_refuses_no_store_with_pages(
    root: Path, name: str
) -> None:
    fill("file", root)
    if not (root / name).exists():
        (root / name).write_text("precious")

    assert is_there("file", root)


def test_both_backends_know_the_same_marks() -> None:
    assert FileLayout.others["hf3fs"] == Hf3fsLayout.kind
    assert Hf3fsLayout.others["file"] == FileLayout.kind
