"""A log file: several processes append to it and rotate it, and it never ends with half a line."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from hicache_storage.request_log.log_file import LogFile, older_file

LIMIT = 1 << 20
LINES, WRITERS = 300, 3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def append_lines(path: Path, writer: int, limit: int) -> None:
    file = LogFile(path, limit, alone=False)
    for number in range(LINES):
        file.append(b"%d:%05d\n" % (writer, number))
    file.close()


def test_lines_are_appended_to_a_file_that_is_there(path: Path) -> None:
    path.write_bytes(b"old\n")
    file = LogFile(path, LIMIT, alone=False)

    file.append(b"new\n")

    assert path.read_bytes() == b"old\nnew\n"


def test_only_the_owner_can_read_a_new_file(path: Path) -> None:
    LogFile(path, LIMIT, alone=False).open()

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_would_exceed_the_limit_becomes_the_older_file(path: Path) -> None:
    file = LogFile(path, 10, alone=False)

    for line in (b"one-\n", b"two-\n", b"three\n"):
        file.append(line)

    assert older_file(path).read_bytes() == b"one-\ntwo-\n"
    assert path.read_bytes() == b"three\n"


def test_only_one_older_file_is_kept(path: Path) -> None:
    file = LogFile(path, 5, alone=False)

    for line in (b"one-\n", b"two-\n", b"three\n"):
        file.append(line)

    assert sorted(path.parent.iterdir()) == [path, older_file(path)]
    assert older_file(path).read_bytes() == b"two-\n"


def test_a_file_that_was_moved_away_is_made_again(path: Path) -> None:
    file = LogFile(path, LIMIT, alone=False)
    file.append(b"one\n")
    path.rename(path.with_name("moved"))

    file.append(b"two\n")

    assert path.read_bytes() == b"two\n"


def test_processes_share_a_file_without_losing_a_line(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=append_lines, args=(path, writer, LIMIT))
        for writer in range(WRITERS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)

    lines = path.read_text().splitlines()
    for writer in range(WRITERS):
        own = [line for line in lines if line.startswith(f"{writer}:")]
        assert own == [f"{writer}:{number:05d}" for number in range(LINES)]


def test_processes_that_rotate_a_file_keep_whole_lines_within_the_limit(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=append_lines, args=(path, writer, 800)) for writer in range(WRITERS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)

    for kept in (path, older_file(path)):
        assert 0 < kept.stat().st_size <= 800
        assert {len(line) for line in kept.read_bytes().splitlines()} == {7}


def test_a_file_of_one_process_refuses_another(path: Path) -> None:
    first, second = LogFile(path, LIMIT, alone=True), LogFile(path, LIMIT, alone=True)
    first.append(b"one\n")

    with pytest.raises(BlockingIOError):
        second.append(b"two\n")
    first.close()
    second.append(b"three\n")

    assert path.read_bytes() == b"one\nthree\n"


def test_a_shared_file_is_locked_only_while_it_is_written(path: Path) -> None:
    file = LogFile(path, LIMIT, alone=False)
    file.append(b"one\n")

    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_part_of_a_line_is_taken_back_where_the_disk_is_full(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LogFile(path, LIMIT, alone=False)
    file.append(b"one\n")
    write = os.write
    answers = iter([3])

    def full(descriptor: int, data: bytes) -> int:
        for size in answers:
            return write(descriptor, data[:size])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            file.append(b"two\n")
    file.append(b"three\n")

    assert path.read_bytes() == b"one\nthree\n"


def test_a_directory_and_a_pipe_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (".", "pipe"):
        with pytest.raises(OSError):  # noqa: PT011 - the system's own words differ
            LogFile(tmp_path / name, LIMIT, alone=False).open()
