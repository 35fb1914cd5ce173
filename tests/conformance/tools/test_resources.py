from __future__ import annotations

from pathlib import Path

import pytest
from hicache_conformance.tools.processes.resources import unwritable


def test_in_an_unwritable_directory_files_are_neither_made_nor_removed(tmp_path: Path) -> None:
    there, new = tmp_path / "there", tmp_path / "new"
    there.write_bytes(b"x")
    with unwritable([tmp_path]):
        for call in (there.unlink, new.touch):
            with pytest.raises(PermissionError):
                call()

        assert b"x" == there.read_bytes()
    there.unlink()
    new.touch()
