from __future__ import annotations

from pathlib import Path

import pytest

from hicache_storage.backend_support.filesystem import is_local

MOUNTS = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]


@pytest.mark.skipif(["/dev/shm", "tmpfs"] not in MOUNTS, reason="no tmpfs there")
def test_memory_is_local() -> None:
    assert is_local("/dev/shm")


def test_an_unknown_file_system_is_not_local() -> None:
    assert not is_local("/proc")


def test_a_missing_path_is_not_local(tmp_path: Path) -> None:
    assert not is_local(str(tmp_path / "missing"))
