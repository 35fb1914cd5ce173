"""What several backends' tests share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


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
