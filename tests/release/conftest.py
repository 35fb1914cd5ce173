"""The project's sdist and wheel, built once a run in `dist/`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from distributions import DIST, made_environment, run
from servers import ROOT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from the sdist. Check what a package index would show."""
    for old in DIST.glob("hicache_storage-*"):
        old.unlink()
    programs = made_environment(tmp_path_factory.mktemp("build") / "environment")
    run(ROOT, programs / "pip", "install", "--quiet", "build", "twine")
    run(ROOT, programs / "python", "-m", "build", "--outdir", str(DIST), HICACHE_NATIVE="1")
    (sdist,) = DIST.glob("*.tar.gz")
    (wheel,) = DIST.glob("*.whl")
    run(ROOT, programs / "twine", "check", "--strict", sdist, wheel)
    return sdist, wheel
