"""Small files that processes change under a lock: the same verdicts and bytes of both data planes."""

from __future__ import annotations

import fcntl
import struct
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import pytest
from data_planes import BOTH, NEEDS_COMPILED, compiled
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage.native import HIT, LATE, MISS, reference


@NEEDS_COMPILED
@settings(deadline=None)
@given(
    record=st.one_of(
        st.binary(max_size=20),
        st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)).map(
            lambda t: struct.pack("<QQ", *t)
        ),
    ),
    added=st.integers(0, 2**40),
    removed=st.integers(0, 2**62),
)
def test_changes_of_totals_of_both_are_equal(record: bytes, added: int, removed: int) -> None:
    found = list[Any]()
    for module in (reference, compiled):
        with TemporaryFile() as anonymous, TemporaryDirectory() as folder:
            path = Path(folder) / "usage"
            path.write_bytes(record)
            with path.open("r+b") as file:
                verdict, *totals = module.change_totals(file.fileno(), added, removed, 0.0)
            found.append((verdict, totals if verdict == HIT else [], path.read_bytes()))
            assert MISS == module.change_totals(anonymous.fileno(), added, removed, 0.0)[0]

    assert found[0] == found[1]


@pytest.mark.parametrize("module", BOTH)
def test_totals_whose_lock_is_held_are_late_and_as_they_were(module: Any, tmp_path: Path) -> None:
    path = tmp_path / "usage"
    path.write_bytes(struct.pack("<QQ", 10, 4))
    with path.open("r+b") as holder, path.open("r+b") as file:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert LATE == module.change_totals(file.fileno(), 1, 1, 0.001)[0]
        fcntl.flock(holder, fcntl.LOCK_UN)

        assert (HIT, 11, 5) == module.change_totals(file.fileno(), 1, 1, 0.001)
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
