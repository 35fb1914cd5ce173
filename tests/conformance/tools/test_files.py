"""Counts and ages of files."""

from __future__ import annotations

import time
from pathlib import Path

from hicache_conformance.tools.observation.files import DirectoryUsage, backdate


def test_usage_counts_the_files_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(bytes(10))
    (tmp_path / "two").write_bytes(bytes(5))

    assert DirectoryUsage(2, 15, 10) == DirectoryUsage.of(tmp_path)


def test_files_can_be_made_old(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()

    backdate(tmp_path, 3600)

    assert time.time() - path.stat().st_mtime > 3500
