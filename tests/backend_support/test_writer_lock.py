"""Locks by flock(2). A second descriptor of one process stands for another process."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hicache_storage.backend_support.writer_lock import (
    WRITER_TOKEN,
    lock_file,
    new_token,
    try_lock,
    try_lock_at,
    unlock_file,
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "lock").touch()
    return str(tmp_path / "lock")


@contextmanager
def opened(path: str) -> Generator[int, None, None]:
    fd = os.open(path, os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


def without_locks(_: int, __: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_tokens_differ_and_match_their_pattern() -> None:
    tokens = {new_token() for _ in range(100)}

    assert 100 == len(tokens)
    assert all(map(WRITER_TOKEN.fullmatch, tokens))


def test_a_lock_is_held_once_until_it_is_released(path: str) -> None:
    with opened(path) as holder, opened(path) as other:
        assert try_lock(holder)
        assert not try_lock(other)
        assert not lock_file(other, 0.01)
        unlock_file(holder)
        assert lock_file(other, 0.0)


def test_shared_locks_hold_off_an_exclusive_one_only(path: str) -> None:
    with opened(path) as holder, opened(path) as reader, opened(path) as writer:
        assert try_lock(holder, fcntl.LOCK_SH)
        assert try_lock(reader, fcntl.LOCK_SH)
        assert not try_lock(writer)


def test_the_lock_of_a_removed_file_does_not_count(path: str) -> None:
    with opened(path) as fd:
        assert try_lock_at(path, fd)
        Path(path).unlink()
        assert not try_lock_at(path, fd)


def test_a_wait_ends_when_the_holder_releases(path: str) -> None:
    with opened(path) as holder, opened(path) as other:
        assert try_lock(holder)
        release = threading.Timer(0.1, unlock_file, args=(holder,))
        release.start()
        begun_s = time.monotonic()

        assert lock_file(other, 30)
        assert time.monotonic() - begun_s < 20
        release.join()


def test_a_file_system_without_locks_is_an_error_of_a_try_and_no_wait(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", without_locks)
    with opened(path) as fd:
        with pytest.raises(OSError, match=os.strerror(errno.ENOLCK)):
            try_lock(fd)
        assert lock_file(fd, 30)
        unlock_file(fd)
