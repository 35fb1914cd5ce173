"""Reads and writes of buffer lists, which continue until they are complete."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from file_roots import failing

from hicache_storage import Page
from hicache_storage.backend_support.vectored_io import (
    DIRECT,
    DIRECT_ALIGNMENT,
    is_aligned,
    move_all,
    takes_direct_reads,
)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def by_bytes(call: Any, most: int) -> Any:
    """Return a version of `call` that moves at most `most` bytes at a time."""

    def cut(fd: int, buffers: Any, offset: int) -> int:
        done: int = call(fd, [memoryview(buffers[0])[:most]], offset)
        return done

    return cut


@pytest.mark.parametrize(
    ("count", "most"),
    [(1, None), (1, 1), (20, 3), (1024, None), (1025, None), (1025, 5), (3000, None)],
)
@pytest.mark.parametrize("offset", [0, 11])
def test_all_bytes_are_moved_whatever_one_call_does(
    fd: int, count: int, most: int | None, offset: int
) -> None:
    pieces = [random.Random(n).randbytes(n % 7 + 1) for n in range(count)]
    targets = [bytearray(len(piece)) for piece in pieces]
    nbytes = sum(map(len, pieces))
    write, read = (
        call if most is None else by_bytes(call, most) for call in (os.pwritev, os.preadv)
    )

    assert nbytes == move_all(write, fd, pieces, nbytes, offset)
    assert nbytes == move_all(read, fd, targets, nbytes, offset)
    assert pieces == [bytes(target) for target in targets]


@pytest.mark.parametrize("nbytes", [0, 1, 10])
def test_a_read_ends_with_the_file(fd: int, nbytes: int) -> None:
    os.pwrite(fd, bytes(nbytes), 0)

    assert nbytes == move_all(os.preadv, fd, [bytearray(7), bytearray(7)], 14)


def test_aligned_pages_are_made_of_whole_blocks() -> None:
    with mmap.mmap(-1, 3 * DIRECT_ALIGNMENT) as memory, memoryview(memory) as view:
        pages = {
            (begin, end): is_aligned(Page(view[begin:end]))
            for begin, end in ((0, 4096), (4096, 12288), (0, 4095), (1, 4097))
        }

    assert {k: bool(DIRECT) and k in {(0, 4096), (4096, 12288)} for k in pages} == pages


def test_a_refused_read_means_no_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "file")
    assert not takes_direct_reads(path)

    (tmp_path / "file").write_bytes(b"x" * 16)
    assert takes_direct_reads(path) == _opens(path, DIRECT)

    monkeypatch.setattr(os, "preadv", failing("preadv", errno.EINVAL))
    assert not takes_direct_reads(path)


def _opens(path: str, flag: int) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | flag))
    except OSError:
        return False
    return bool(flag)
