"""What one process holds open in a root directory: its writer, the ledger and the capacity."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from hicache_backends.file.capacity import Capacity, Limits
from hicache_backends.file.ledger import Ledger
from hicache_backends.file.writer import Writer, collect_dead
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_backends.file.clock import RootClock
    from hicache_backends.file.layout import Layout
    from hicache_storage.backend_support.counters import Counters

_CLOSE_LIMIT_S = 9.0
_POLL_S = 0.01


class ProcessState:
    """The open root of one process. Thread-safe.

    A forked child makes its own state, and only calls `abandon` on the state of its parent.
    """

    def __init__(
        self, layout: Layout, limits: Limits, clock: RootClock, counters: Counters
    ) -> None:
        self.layout = layout
        self.clock = clock
        self.counters = counters
        self._writing: set[int] = set()
        """The threads that are in a batch."""
        self.stop = bytearray(1)
        """1 once `close` has begun: then pages that are not being written yet are refused."""
        with ExitStack() as undo:
            self.writer = Writer(layout.writers)
            undo.callback(self.writer.close)
            dead = collect_dead(layout.writers)
            counters.add("dead_writers", dead)
            self.ledger = Ledger(layout.usage, self.writer.pending_nbytes)
            undo.callback(self.ledger.close)
            self.capacity = Capacity(
                layout, limits, self.writer, self.ledger, counters, clock=clock, crashed=dead > 0
            )
            undo.pop_all()

    @contextmanager
    def writing(self) -> Generator[None]:
        """Hold off `close` while a batch uses temporary files."""
        thread = threading.get_ident()
        try:
            self._writing.add(thread)
            yield
        finally:
            self._writing.discard(thread)

    def restore_writer(self, deadline: Deadline) -> None:
        """Make the writer's directory again after another program has removed it.

        Raises:
            StorageUnavailable: The root is gone.
        """
        try:
            self.writer.restore(deadline)
        except OSError as error:
            raise StorageUnavailable(
                f"file: {self.layout.root} cannot be written to: {error.strerror}"
            ) from error

    def close(self) -> None:
        """Close everything after the running batches have ended. Idempotent.

        If the file system hangs, a daemon thread goes on and this call returns in time.
        """
        self.stop[0] = 1
        thread = threading.Thread(target=self._close, name="hicache-file-close", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is exiting and starts no more threads
            self._close()
        else:
            thread.join(_CLOSE_LIMIT_S)

    def abandon(self) -> None:
        """Close the descriptors in a forked child, and leave the files of its parent unchanged."""
        self.writer.abandon()
        self.ledger.abandon()

    def _close(self) -> None:
        deadline = Deadline(_CLOSE_LIMIT_S)
        while self._writing and not deadline.passed():
            time.sleep(_POLL_S)
        self.capacity.close(deadline)
        if self.capacity.is_in_doubt:
            self.writer.abandon()  # as after a crash: the next process counts the pages
        else:
            self.writer.close()
        self.ledger.close()
