"""A writer that is killed at any call on a file: pages are whole or absent, and no slot is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_planes import NEEDS_COMPILED
from hf3fs_roots import SLOT_NBYTES, SPACE, counted, opened, stored
from hf3fs_roots import hits as assert_hits_are_right
from kill_points import killed_at, library

_PAGES = 4
_CAPACITY_NBYTES = 16 * SLOT_NBYTES
# Every set evicts pages and overwrites their slots.
_SCRIPT = f"""
from hf3fs_roots import opened, stored
from pathlib import Path
def prepare():
    storage = opened(Path(folder), capacity_nbytes={_CAPACITY_NBYTES})
    storage.stats()
    return storage
def work(storage):
    stored(storage, range(100, {100 + _PAGES}))
"""


@pytest.mark.parametrize(
    "compiled",
    [pytest.param(True, marks=NEEDS_COMPILED, id="compiled"), pytest.param(False, id="python")],
)
def test_no_call_at_which_a_writer_is_killed_leaves_a_wrong_page_or_loses_a_slot(
    root: Path, tmp_path: Path, *, compiled: bool
) -> None:
    old, new = range(14), range(100, 100 + _PAGES)
    calls = 0
    with killed_at(library(tmp_path), root, _SCRIPT, native=compiled) as kill:
        for number in range(1, 1000):
            with opened(root, capacity_nbytes=_CAPACITY_NBYTES) as storage:
                storage.clear(SPACE)
                stored(storage, old)
            if not kill(number):
                break
            calls += 1
            with opened(root, capacity_nbytes=_CAPACITY_NBYTES) as storage:
                assert_hits_are_right(storage, old)
                assert_hits_are_right(storage, new)
                stored(storage, new)
            reserved, _, lost = counted(root)
            assert (0, 0) == (reserved, lost)
            assert [] == list((root / "writers").iterdir())

    assert calls > 2 * _PAGES, "the calls of the set were not counted"
