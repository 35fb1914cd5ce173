"""Roots of `hf3fs` for tests: pages, counts of the SQLite index, child processes."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any

from hicache_backends.hf3fs import Hf3fsStorage
from hicache_backends.hf3fs.layout import Geometry
from pages import blank, hash_of, page, space

NBYTES = 256 << 10
SPACE = space(page_nbytes=NBYTES)
SLOT_NBYTES = Geometry(SPACE).slot_nbytes
HASHES = [hash_of(number) for number in range(64)]


def opened(root: Path, **config: Any) -> Hf3fsStorage:
    storage = Hf3fsStorage.from_config({"path": str(root), **config})
    storage.open_space(SPACE)
    return storage


def stored(storage: Hf3fsStorage, numbers: range) -> None:
    pages = [page(NBYTES, seed=n) for n in numbers]
    assert [True] * len(pages) == storage.batch_set(SPACE, [hash_of(n) for n in numbers], pages)


def hits(storage: Hf3fsStorage, numbers: range) -> list[bool]:
    """Return for each page whether it is a hit. A hit must have the right bytes."""
    targets = [blank(NBYTES) for _ in numbers]
    verdicts = storage.batch_get(SPACE, [hash_of(n) for n in numbers], targets)
    for number, hit, target in zip(numbers, verdicts, targets, strict=True):
        assert not hit or target.tobytes() == page(NBYTES, seed=number).tobytes()
    return verdicts


def counted(root: Path) -> tuple[int, int, int]:
    """Return the numbers of slots that are reserved, taken, and neither free nor taken."""
    with closing(sqlite3.connect(root / "index.sqlite")) as db:
        query = (
            "SELECT (SELECT count(*) FROM reserved), sum(taken),"
            " sum(allocated) - sum(taken) - (SELECT count(*) FROM free) FROM spaces"
        )
        reserved, taken, lost = db.execute(query).fetchone()
    return reserved, taken, lost


@contextmanager
def child(script: str, *arguments: object) -> Generator[tuple[int, IO[str]], None, None]:
    """Run `script` in a process with the tests' helpers. Yield its id and its output."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    with process.stdout as output, process.stdin:
        try:
            yield process.pid, output
        finally:
            process.kill()
            process.wait()
