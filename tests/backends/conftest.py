"""Fixtures and test selection for the tests of several backends."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hicache_conformance import StorageConformance

from hicache_storage import native
from hicache_storage.native import reference


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the kit's tests that do not concern their class.

    A class keeps the tests whose names match its pattern `concerns` and, in quick runs, `in_quick_runs`.
    """
    left_out = dict.fromkeys(item for item in items if not _is_wanted(item, config))
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


def _is_wanted(item: pytest.Item, config: pytest.Config) -> bool:
    if getattr(getattr(item, "function", None), "hicache_check", None) is None:
        return True
    cls: type[StorageConformance] | None = getattr(item, "cls", None)
    patterns = ["concerns", *(["in_quick_runs"] if config.option.hicache_quick else [])]
    return all(re.search(getattr(cls, name, ""), item.name) for name in patterns)


@pytest.fixture
def python_data_plane() -> Iterator[None]:
    """Replace the compiled data plane, whose system calls a test can't patch, by the one in Python.

    The patches outlast `monkeypatch.undo()` in the test.
    """
    with pytest.MonkeyPatch.context() as patches:
        for name in set(native.__all__) & set(reference.__all__):
            patches.setattr(native, name, getattr(reference, name))
        yield


@pytest.fixture(params=["compiled", "python"])
def transport(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test with the compiled data plane on plain sockets, or without a compiled module."""
    if request.param == "compiled" and native.implementation != "compiled":
        pytest.skip("there is no compiled data plane here")
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(
            native, "implementation", {"python": "reference"}.get(request.param, "compiled")
        )
        yield


@pytest.fixture(params=["disk", "shm"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield the path of a missing directory, on the disk's file system and on tmpfs."""
    if request.param == "disk":
        yield tmp_path / "root"
        return
    if not Path("/dev/shm").is_dir():
        pytest.skip("no tmpfs here")
    path = Path("/dev/shm") / f"hicache-{os.getpid()}-{tmp_path.name}"
    yield path
    shutil.rmtree(path, ignore_errors=True)
