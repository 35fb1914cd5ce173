"""What several backends' tests share."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_conformance import StorageConformance
    from hicache_conformance.checks import Check


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the kit's tests leave out what a class says is too long for every day, or no matter of its.

    `in_suite` and `concerns` are patterns of their names; in the suite only quick checks run.
    HICACHE_FULL=1 runs all that a class is concerned with.
    """
    left_out = [item for item in items if not _is_wanted(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = filter(_is_wanted, items)


def _is_wanted(item: pytest.Item) -> bool:
    check: Check | None = getattr(getattr(item, "function", None), "hicache_check", None)
    cls: type[StorageConformance] | None = getattr(item, "cls", None)
    if check is None or not re.search(getattr(cls, "concerns", ""), item.name):
        return check is None
    in_suite: str | None = getattr(cls, "in_suite", None)
    if in_suite is None or os.environ.get("HICACHE_FULL"):
        return True
    return check.quick and re.search(in_suite, item.name) is not None


@pytest.fixture(params=["disk", "shm"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory yet to be made: on the disk's file system, and on tmpfs."""
    if request.param == "disk":
        yield tmp_path / "root"
        return
    if not Path("/dev/shm").is_dir():
        pytest.skip("no tmpfs here")
    path = Path("/dev/shm") / f"hicache-{os.getpid()}-{tmp_path.name}"
    yield path
    shutil.rmtree(path, ignore_errors=True)
