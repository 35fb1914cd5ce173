"""A writer that is killed at any call on a file: pages are whole or absent, and the store goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_planes import NEEDS_COMPILED
from file_roots import FILE_NBYTES, SPACE, opened
from kill_points import killed_at, library
from pages import blank, hash_of, page

_PAGES = 6
_CAPACITY = 16 * FILE_NBYTES
# Every set evicts pages and overwrites their files.
_SCRIPT = f"""
import sys
from file_roots import SPACE, opened
from pages import hash_of, page
from pathlib import Path
numbers = range(100, {100 + _PAGES})
def prepare():
    storage = opened(Path(folder), capacity_nbytes={_CAPACITY})
    storage.stats()
    return storage
def work(storage):
    storage.batch_set(SPACE, [hash_of(n) for n in numbers], [page(seed=n) for n in numbers])
"""


@pytest.mark.parametrize(
    "compiled",
    [pytest.param(True, marks=NEEDS_COMPILED, id="compiled"), pytest.param(False, id="python")],
)
def test_no_call_at_which_a_writer_is_killed_leaves_a_wrong_page(
    root: Path, tmp_path: Path, *, compiled: bool
) -> None:
    old, new = range(20), range(100, 100 + _PAGES)
    calls = 0
    with killed_at(library(tmp_path), root, _SCRIPT, native=compiled) as kill:
        for number in range(1, 1000):
            with opened(root, capacity_nbytes=_CAPACITY) as storage:
                storage.batch_delete(SPACE, [hash_of(n) for n in (*old, *new)])
                for n in old:
                    storage.batch_set(SPACE, [hash_of(n)], [page(seed=n)])
            if not kill(number):
                break
            calls += 1
            with opened(root, capacity_nbytes=_CAPACITY) as storage:
                for n in (*old, *new):
                    target = blank()
                    if storage.batch_get(SPACE, [hash_of(n)], [target]) == [True]:
                        assert page(seed=n).tobytes() == target.tobytes(), (number, n)
                pages = [page(seed=n) for n in new]
                assert [True] * _PAGES == storage.batch_set(SPACE, [hash_of(n) for n in new], pages)
            assert [] == list((root / "writers").iterdir())

    assert calls > 2 * _PAGES, "the calls of the set were not counted"
