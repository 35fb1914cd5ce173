"""The writer's thread: lines are written in order, or dropped and counted; `add` never waits."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from servers import wait_until

from hicache_storage.request_log.line_writer import LineWriter
from hicache_storage.request_log.log_file import LogFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def shared(path: Path) -> LogFile:
    return LogFile(path, 1 << 20, alone=False)


def line(text: str) -> Callable[[], str]:
    return lambda: f"{text}\n"


def test_lines_are_written_in_order(path: Path) -> None:
    writer = LineWriter(shared(path))

    for number in range(2500):
        writer.add(line(str(number)))
    writer.close()

    assert path.read_text().split() == [str(number) for number in range(2500)]
    assert writer.dropped_lines == 0


def test_a_line_is_written_without_another_one(path: Path) -> None:
    writer = LineWriter(shared(path))

    writer.add(line("one"))

    wait_until(lambda: path.read_text() == "one\n")
    writer.close()


def test_a_line_is_made_by_the_thread(path: Path) -> None:
    made_by: list[str] = []

    def make() -> str:
        made_by.append(threading.current_thread().name)
        return "line\n"

    writer = LineWriter(shared(path))
    writer.add(make)
    writer.close()

    assert made_by == ["hicache-request-log"]


def test_a_file_that_hangs_drops_lines_and_blocks_no_caller(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = LineWriter(
        shared(path), dropped_line=lambda lines: f"dropped {lines}\n", queued_lines=10
    )
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # the thread waits for this lock
        writer.add(line("first"))
        wait_until(writer._queue.empty)
        began_s = time.monotonic()
        for number in range(1000):
            writer.add(line(str(number)))
        elapsed_s = time.monotonic() - began_s
        assert writer.dropped_lines == 990
        assert elapsed_s < 10
    writer.close()

    assert path.read_text().split("\n") == [
        "first",
        *map(str, range(10)),
        "dropped 990",
        "",
    ]
    assert "lacks them: 990 so far" in caplog.text


def test_a_line_that_cannot_be_made_is_dropped_alone(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> str:
        raise RuntimeError("a wrong record")

    writer = LineWriter(shared(path))
    for each in (line("one"), broken, line("two")):
        writer.add(each)
    writer.close()

    assert path.read_text() == "one\ntwo\n"
    assert writer.dropped_lines == 1
    assert "cannot be made" in caplog.text


def test_lines_that_were_dropped_last_are_told_at_the_end(path: Path) -> None:
    def broken() -> str:
        raise RuntimeError("a wrong record")

    writer = LineWriter(shared(path), dropped_line=lambda lines: f"dropped {lines}\n")
    writer.add(broken)
    writer.close()

    assert path.read_text() == "dropped 1\n"


def test_a_file_that_fails_is_told_once_and_tried_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = LineWriter(shared(path), dropped_line=lambda lines: f"dropped {lines}\n")
    away = path.parent.with_name("away")
    path.parent.rename(away)
    writer.add(line("lost"))
    wait_until(lambda: writer.dropped_lines == 1)
    writer.add(line("lost"))
    wait_until(lambda: writer.dropped_lines == 2)
    away.rename(path.parent)
    writer.add(line("kept"))
    writer.close()

    assert path.read_text() == "kept\ndropped 2\n"
    assert caplog.text.count("cannot be written") == 1


def test_a_line_after_the_end_is_dropped(path: Path) -> None:
    writer = LineWriter(shared(path))
    writer.close()

    writer.add(line("late"))
    writer.close()

    assert path.read_text() == ""
    assert writer.dropped_lines == 1


def test_the_end_waits_for_a_file_that_hangs_no_longer_than_told(path: Path) -> None:
    writer = LineWriter(shared(path))
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        writer.add(line("one"))

        writer.close(timeout_s=0.1)

    wait_until(lambda: path.read_text() == "one\n")


def test_a_forked_child_writes_nothing_and_does_not_wait(path: Path) -> None:
    writer = LineWriter(shared(path), queued_lines=1)

    child = os.fork()
    if child == 0:
        try:
            for _ in range(3):
                writer.add(line("child"))
            writer.close()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    writer.add(line("parent"))
    writer.close()

    assert os.waitstatus_to_exitcode(status) == 0
    assert path.read_text() == "parent\n"
