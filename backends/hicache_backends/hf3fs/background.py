"""Work that goes on past the deadline of the call that began it, as to read a million marks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hicache_storage.errors import StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.backend_support.deadline import Deadline

_CLOSE_S = 5.0
AT_OPEN_S = 10.0**8
"""Opening a store waits for as long as it takes: a program that gives up would begin again each time."""


class Background:
    """One work at a time, in a thread, for all calls that need it. Belongs to one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._task: _Task | None = None
        self._closed = threading.Event()

    def run(self, work: Callable[[], None], deadline: Deadline) -> None:
        """Begin `work`, unless it is going on, and wait for its end; raise what it raises.

        Raises:
            StorageTimeout: It did not end by the deadline. It goes on.
            StorageUnavailable: The system has no thread for it. The next call begins it.
        """
        with self._lock:
            task = self._task
            if task is None or task.ended.is_set():
                task = _Task(work)
                try:
                    task.start()
                except RuntimeError:
                    raise StorageUnavailable(
                        "hf3fs: the index cannot be made: the system has no thread"
                    ) from None
                self._task = task
        if not task.ended.wait(deadline.remaining_s()):
            raise StorageTimeout(
                f"hf3fs: the index is being made anew, for longer than {deadline.timeout_s:g} s: it is"
                " used when that is done"
            )
        if task.error is not None:
            raise task.error

    def check(self) -> None:
        """Go on, unless it was closed: what the work calls now and then.

        Raises:
            StorageUnavailable: It was closed.
        """
        if self._closed.is_set():
            raise StorageUnavailable("hf3fs: the storage was closed while the index was made anew")

    def close(self) -> None:
        """End the work, within a while. Idempotent."""
        self._closed.set()
        task = self._task
        if task is not None:
            task.join(_CLOSE_S)


class _Task(threading.Thread):
    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="hf3fs-index", daemon=True)
        self._work = work
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - the calls that wait raise it
            self.error = error
        finally:
            self.ended.set()
