"""A thread that writes lines to a file, so that no thread of an engine ever waits for the file."""

from __future__ import annotations

import logging
import os
import queue
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.request_log.log_file import LogFile

logger: logging.Logger = logging.getLogger("hicache_storage.request_log")

QUEUED_LINES = 10_000
_BATCH_LINES = 100
_CLOSE_TIMEOUT_S = 5.0


class LineWriter:
    """A bounded queue of lines, and the thread `hicache-request-log` that appends them to a file.

    Thread-safe. `add` neither waits nor raises: a line that finds no room in the queue, or cannot be
    written, is dropped and counted. In a forked child, which lacks the thread, `add` does nothing.
    """

    def __init__(
        self,
        file: LogFile,
        *,
        dropped_line: Callable[[int], str] | None = None,
        queued_lines: int = QUEUED_LINES,
    ) -> None:
        """Open the file, and start the thread.

        `dropped_line` makes a line that tells of dropped lines, once lines can be written again.

        Raises:
            OSError: The file cannot be written.
        """
        file.open()
        self._file = file
        self._dropped_line = dropped_line
        self._pid = os.getpid()
        self._queue: queue.Queue[Callable[[], str] | None] = queue.Queue(queued_lines)
        self._lock = threading.Lock()
        self._dropped = self._told = 0
        self._closing = False
        self._fails = False
        self._thread = threading.Thread(target=self._run, name="hicache-request-log", daemon=True)
        self._thread.start()

    @property
    def dropped_lines(self) -> int:
        """The number of lines that were dropped."""
        return self._dropped

    def add(self, line: Callable[[], str]) -> None:
        """Queue a line, which the thread makes. Neither waits nor raises."""
        if os.getpid() != self._pid:
            return
        if self._closing:
            self._count_dropped(1)
            return
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._count_dropped(1)

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Write the queued lines within `timeout_s`, and close the file. Idempotent."""
        if os.getpid() != self._pid:
            return
        self._closing = True
        with suppress(queue.Full):  # a full queue wakes the thread, too
            self._queue.put_nowait(None)
        self._thread.join(timeout_s)

    def _count_dropped(self, lines: int) -> None:
        with self._lock:
            self._dropped += lines

    def _run(self) -> None:
        while True:
            batch = [self._queue.get()]
            while len(batch) < _BATCH_LINES and not self._queue.empty():
                batch.append(self._queue.get_nowait())  # this thread alone takes from the queue
            self._write([line for line in batch if line is not None])
            if self._closing and self._queue.empty():
                break
        self._write([])  # tells of the last dropped lines
        self._file.close()

    def _write(self, lines: list[Callable[[], str]]) -> None:
        texts = [text for line in lines if (text := self._made(line))]
        dropped = self._dropped
        try:
            told = ""
            if self._dropped_line is not None and dropped > self._told:
                told = self._dropped_line(dropped - self._told)
            if texts or told:
                self._file.append("".join([*texts, told]).encode("utf-8", "backslashreplace"))
            if dropped > self._told == 0:
                logger.warning(
                    "%s lacks lines, because they were dropped: %d so far", self._file.path, dropped
                )
            self._told = dropped
            self._fails = False
        except Exception as error:  # noqa: BLE001 - the thread goes on
            self._count_dropped(len(texts))
            level = logging.DEBUG if self._fails else logging.WARNING
            self._fails = True
            logger.log(
                level, "%s cannot be written, so lines are dropped: %s", self._file.path, error
            )

    def _made(self, line: Callable[[], str]) -> str:
        """Return the text of a line, or none where the line cannot be made."""
        try:
            return line()
        except Exception:
            self._count_dropped(1)
            logger.exception("a line of %s cannot be made", self._file.path)
            return ""
