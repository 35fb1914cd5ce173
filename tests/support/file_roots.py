"""Roots of `file` for tests: pages by number, the files under a root, system calls that fail."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hicache_backends.file import FileStorage
from hicache_backends.file.page_file import TRAILER_NBYTES
from pages import blank, hash_of, page, space

SPACE = space()
FILE_NBYTES = 4096 + TRAILER_NBYTES
HASHES = [hash_of(number) for number in range(200)]


def opened(root: Path, pages: int | None = None, **config: Any) -> FileStorage:
    """Return a storage with a capacity of `pages`."""
    limit = {} if pages is None else {"capacity_nbytes": pages * FILE_NBYTES}
    storage = FileStorage.from_config({"path": str(root), **limit, **config})
    storage.open_space(SPACE)
    return storage


def put(storage: FileStorage, *numbers: int) -> list[bool]:
    """Set pages one by one, so that each is newer than the one before."""
    return [storage.batch_set(SPACE, [HASHES[n]], [page(seed=n)])[0] for n in numbers]


def there(storage: FileStorage, numbers: Sequence[int] = range(200)) -> list[int]:
    """Return the numbers of the pages that exist."""
    present = storage.batch_exists(SPACE, [HASHES[n] for n in numbers])
    return [n for n, is_there in zip(numbers, present, strict=True) if is_there]


def is_right(storage: FileStorage, number: int) -> bool:
    """Return True if the page is a hit with the right bytes."""
    target = blank()
    hit = storage.batch_get(SPACE, [hash_of(number)], [target]) == [True]
    return hit and target.tobytes() == page(seed=number).tobytes()


def file_of(root: Path, number: int) -> Path:
    return root / "spaces" / SPACE.id / HASHES[number][:2] / HASHES[number]


def used_nbytes(root: Path) -> int:
    """Return how many bytes all page files have, even while another process removes some."""
    nbytes = 0
    for path in root.glob("spaces/*/??/*"):
        try:
            nbytes += path.stat().st_size
        except FileNotFoundError:
            continue
    return nbytes


def failing(name: str, code: int, when: Callable[..., bool] = lambda *_: True) -> Any:
    """Return the system call `name`, which fails with `code` for arguments for which `when` is true."""
    real = getattr(os, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    return call


def within(call: Callable[[], object], limit_s: float) -> object:
    """Return the result or the error of `call`. Fail if it takes longer than `limit_s`."""
    answers: list[object] = []

    def run() -> None:
        try:
            answers.append(call())
        except Exception as error:  # noqa: BLE001 - the error is the answer
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert answers, f"no answer within {limit_s} s"
    return answers[0]


def run_python(script: str, *args: object) -> subprocess.Popen[str]:
    """Start a process that runs `script` with the tests' helpers."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
    )
