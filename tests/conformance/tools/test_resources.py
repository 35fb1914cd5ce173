from __future__ import annotations

from pathlib import Path

import pytest
from hicache_conformance.tools.processes.resources import unwritable, wait_until


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


def test_a_fact_is_looked_at_again_after_a_pause_of_the_process() -> None:
    looks = iter([False, False, True])

    assert wait_until(lambda: next(looks), 0.0)
