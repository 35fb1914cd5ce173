"""What several backends' tests share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out checks of the kit that a class names as too long for `make test` (`s3_kit`)."""
    left_out = [item for item in items if _is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _is_left_out(item: pytest.Item) -> bool:
    check = getattr(getattr(item, "obj", None), "hicache_check", None)
    leaves_out = getattr(getattr(item, "cls", None), "leaves_out", None)
    return check is not None and leaves_out is not None and leaves_out(check)


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
