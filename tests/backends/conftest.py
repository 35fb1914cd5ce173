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
    """Of the kit's tests leave out what a class says is too long for every day.

    `in_suite` is a pattern of their names, of quick checks only. HICACHE_FULL=1 runs all of them.
    """
    left_out = [item for item in items if _is_too_long(item)]
    if left_out and not os.environ.get("HICACHE_FULL"):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _is_too_long(item: pytest.Item) -> bool:
    check: Check | None = getattr(getattr(item, "function", None), "hicache_check", None)
    cls: type[StorageConformance] | None = getattr(item, "cls", None)
    wanted: str | None = getattr(cls, "in_suite", None)
    if wanted is None or check is None:
        return False
    return not (check.quick and re.search(wanted, item.name))


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
