"""The project's sdist and wheels, built once a run in `dist/`."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import pytest
from distributions import DIST, WHEELS_PYTHON, run
from servers import ROOT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def distributions() -> tuple[Path, Path]:
    """Build the sdist and all wheels. Return the sdist, and the wheel for this machine's glibc."""
    print(run(ROOT, WHEELS_PYTHON, "build_wheels.py"))  # noqa: T201 - names and sizes
    (sdist,) = DIST.glob("*.tar.gz")
    (wheel,) = DIST.glob(f"*manylinux*_{platform.machine()}.whl")
    return sdist, wheel
