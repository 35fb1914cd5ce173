"""One process's presence on a root directory: its writer, its view of the ledger, its victims."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from hicache_backends.file._ledger import Ledger
from hicache_backends.file._page_file import Reading
from hicache_backends.file._room import Limits, Room
from hicache_backends.file._writer import Writer, collect_dead
from hicache_storage.errors import StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_backends.file._layout import Layout
    from hicache_backends.file._page_file import PageFiles
    from hicache_storage.counters import Counters

_CLOSE_TIMEOUT_S = 10.0


class Presence:
    """What a process holds of a root between opening and closing it. Thread-safe.

    Belongs to the process that made it: a forked child makes its own, and only calls `forget` here.
    """

    def __init__(self, layout: Layout, limits: Limits, counters: Counters) -> None:
        self.layout = layout
        self.counters = counters
        self.writer = Writer(layout.writers)
        counters.add("dead_writers", collect_dead(layout.writers))
        self.ledger = Ledger(layout.usage)
        self.room = Room(layout, limits, self.writer, self.ledger, counters)
        self._changed = threading.Condition()
        self._saving = 0
        self.closing = False
        """Pages not begun are refused from now on."""

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

    def restore(self) -> None:
        """Make the own directory anew after it was removed behind our back.

        Raises:
            StorageUnavailable: The root is gone.
        """
        try:
            self.writer.restore()
        except OSError as error:
            raise StorageUnavailable(
                f"file: {self.layout.root} cannot be written to: {error.strerror}"
            ) from error

    def heal(self, files: PageFiles, page_hash: str) -> None:
        """Remove a file that is not the page of its name, so that it can be set again.

        It is taken aside and looked at once more: whoever has just put the right page there keeps it.
        """
        path, aside = files.path(page_hash), self.writer.temp_path()
        if files.check(path, page_hash) is not Reading.WRONG:
            return
        with suppress(FileNotFoundError):
            os.rename(path, aside)
            if files.check(aside, page_hash) is Reading.WRONG:
                self.room.remove(aside, files.file_nbytes)
                self.counters.add("healed")
            else:
                os.rename(aside, path)

    def close(self) -> None:
        """Give everything back, after the calls that are still writing. Idempotent."""
        self.closing = True
        with self._changed:
            self._changed.wait_for(lambda: not self._saving, _CLOSE_TIMEOUT_S)
        self.room.close()
        self.writer.close()
        self.ledger.close()

    def forget(self) -> None:
        """Let go in a forked child, without touching what the parent still uses."""
        self.writer.forget()
        self.ledger.forget()
