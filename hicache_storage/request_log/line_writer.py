"""Write lines to a file in a separate thread, so that an engine's threads never wait for the file."""

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
    """A bounded queue of lines, with the thread `hicache-request-log` that appends them to a file.

    Thread-safe. `add` never waits and never raises: a line is dropped and counted if the queue is
    full, or if it cannot be written. In a forked child, which lacks the thread, `add` does nothing.
    """

    def __init__(
        self,
        file: LogFile,
        *,
        dropped_line: Callable[[int], str] | None = None,
        queued_lines: int = QUEUED_LINES,
    ) -> None:
        """Open the file, and start the thread.

        If lines were dropped, `dropped_line` makes a line about them once lines can be written again.

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
        """The number of lines dropped so far."""
        return self._dropped

    def add(self, line: Callable[[], str]) -> None:
        """Queue a line. The thread calls `line` to make the text. Never wait and never raise."""
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
        with suppress(queue.Full):  # if the queue is full, the thread is awake
            self._queue.put_nowait(None)
        self._thread.join(timeout_s)

    def _count_dropped(self, lines: int) -> None:
        with self._lock:
            self._dropped += lines

    def _run(self) -> None:
        while True:
            batch = [self._queue.get()]
            while len(batch) < _BATCH_LINES and not self._queue.empty():
                batch.append(self._queue.get_nowait())  # only this thread takes from the queue
            self._write([line for line in batch if line is not None])
            if self._closing and self._queue.empty():
                break
        self._write([])  # reports the last dropped lines
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
                    "lines were dropped, so %s lacks them: %d so far", self._file.path, dropped
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
        """Return the text of a line, or "" if the line cannot be made."""
        try:
            return line()
        except Exception:
            self._count_dropped(1)
            logger.exception("a line of %s cannot be made", self._file.path)
            return ""
