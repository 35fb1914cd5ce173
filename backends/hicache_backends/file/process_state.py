"""One process's presence on a root directory: its writer, its view of the ledger, its victims."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from hicache_backends.file.capacity import Capacity, Limits
from hicache_backends.file.ledger import Ledger
from hicache_backends.file.page_file import Reading
from hicache_backends.file.writer import Writer, collect_dead
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_backends.file.layout import Layout
    from hicache_backends.file.page_file import PageFiles
    from hicache_storage.backend_support.counters import Counters

_CLOSE_TIMEOUT_S = 9.0


class ProcessState:
    """What a process holds of a root between opening and closing it. Thread-safe.

    Belongs to the process that made it: a forked child makes its own, and only calls `forget` here.
    """

    def __init__(self, layout: Layout, limits: Limits, counters: Counters) -> None:
        self.layout = layout
        self.counters = counters
        self._changed = threading.Condition()
        self._saving = 0
        self.closing = False
        """Pages not begun are refused from now on."""
        with ExitStack() as undoing:
            self.writer = Writer(layout.writers)
            undoing.callback(self.writer.close)
            dead = collect_dead(layout.writers)
            counters.add("dead_writers", dead)
            self.ledger = Ledger(layout.usage, self.writer.promised)
            undoing.callback(self.ledger.close)
            self.room = Capacity(
                layout, limits, self.writer, self.ledger, counters, crashed=dead > 0
            )
            undoing.pop_all()

    @contextmanager
    def saving(self) -> Generator[None]:
        """While temporary files are in use: `close` waits for it."""
        with self._changed:
            self._saving += 1
        try:
            yield
        finally:
            with self._changed:
                self._saving -= 1
                self._changed.notify_all()

    def restore(self, deadline: Deadline) -> None:
        """Make the own directory anew after it was removed behind our back.

        Raises:
            StorageUnavailable: The root is gone.
        """
        try:
            self.writer.restore(deadline)
        except OSError as error:
            raise StorageUnavailable(
                f"file: {self.layout.root} cannot be written to: {error.strerror}"
            ) from error

    def heal(self, files: PageFiles, page_hash: str, deadline: Deadline) -> None:
        """Remove a file that is not the page of its name, so that it can be set again.

        It is taken aside and looked at once more: whoever has just put the right page there keeps it.
        """
        path, aside = files.path(page_hash), self.writer.temp_path()
        if files.check(path, page_hash) is not Reading.WRONG:
            return
        with suppress(FileNotFoundError):
            os.rename(path, aside)
            if self._is_wrong(files, aside, page_hash):
                self.room.remove(aside, files.file_nbytes, deadline)
                self.counters.add("healed")
            else:
                os.rename(aside, path)

    @staticmethod
    def _is_wrong(files: PageFiles, path: str, page_hash: str) -> bool:
        """Whether a file is seen to be another page. One that cannot be read is not."""
        try:
            return files.check(path, page_hash) is Reading.WRONG
        except OSError:
            return False

    def close(self) -> None:
        """Give everything back, after the calls that are still writing. Idempotent.

        A file system that hangs is left behind in time, in a thread.
        """
        self.closing = True
        ending = threading.Thread(target=self._end, name="hicache-file-close", daemon=True)
        try:
            ending.start()
        except RuntimeError:  # the interpreter is exiting, and starts no thread any more
            self._end()
        else:
            ending.join(_CLOSE_TIMEOUT_S)

    def forget(self) -> None:
        """Let go in a forked child, without touching what the parent still uses."""
        self.writer.forget()
        self.ledger.forget()
        self.room.forget()

    def _end(self) -> None:
        deadline = Deadline(_CLOSE_TIMEOUT_S)
        with self._changed:
            self._changed.wait_for(lambda: not self._saving, deadline.remaining_s())
        self.room.close(deadline)
        self.writer.close()
        self.ledger.close()
