"""Keep SQLite connections and lock descriptors from crossing a fork.

SQLite keeps a table of its locks in the memory of the process, by inode. A forked child inherits the
table but not the locks. So if the child connected to such a file, it would take no lock, and other
processes would remove the log that the child uses. SQLite drops a file's entry when the last
connection to the file is closed. Therefore we close every connection before a fork; the next step that
needs one opens it again, in the parent and in the child. If a connection is in use for longer than
`WAIT_S`, it stays open, and the child refuses every SQLite index, because a thread that does not exist
there may hold SQLite's mutexes.

An flock(2) lock belongs to the open file, which parent and child share. The child closes its
copies, so that a lock ends with the process that took it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from hicache_storage.errors import StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_storage.backend_support.deadline import Deadline

WAIT_S = 5.0
"""The longest time that a fork waits for steps that use a connection or take a lock."""


class ConnectionOwner(Protocol):
    """The owner of one connection."""

    @property
    def connection(self) -> object:
        """The connection, or None."""

    def disconnect(self) -> None:
        """Close the connection. The next step opens another connection."""


class ForkGuard:
    """The steps and forks of one process. A fork waits for running steps; new steps wait for the fork.

    Thread-safe. A step inside another step of the same thread does not wait for a fork, because the
    fork waits for the outer step. A fork does not wait for steps of the forking thread, because
    they cannot end before the fork.
    """

    def __init__(self) -> None:
        self._connected: set[ConnectionOwner] = set()
        self._descriptors: set[int] = set()
        self._refused = False
        self._busy: set[ConnectionOwner] = set()
        self._reset()
        os.register_at_fork(
            before=self._before, after_in_parent=self._after, after_in_child=self._after_in_child
        )

    @contextmanager
    def step(
        self, deadline: Deadline, owner: ConnectionOwner | None = None
    ) -> Generator[None, None, None]:
        """Hold off forks while a connection of `owner` is used or a lock is taken.

        Raises:
            StorageUnavailable: A connection was in use when this process was forked.
            StorageTimeout: A fork did not end in time.
        """
        if owner is not None and self._refused:
            raise StorageUnavailable(
                "hf3fs: a call was using the SQLite index when this process was forked: fork between"
                " calls, or start the process with spawn"
            )
        if self._pid != os.getpid():
            raise StorageUnavailable(
                "hf3fs: this process was forked without Python's knowledge: use os.fork, or spawn"
            )
        self._begin(deadline, owner)
        began_in = self._pid
        try:
            yield
        finally:
            if self._pid == began_in:  # a child that was forked in this step counts anew
                self._end(owner)

    def connected(self, owner: ConnectionOwner) -> None:
        """Note that `owner` has a connection. Call this in a step."""
        with self._changed:
            self._connected.add(owner)

    def disconnected(self, owner: ConnectionOwner) -> None:
        """Note that the connection of `owner` is closed."""
        with self._changed:
            self._connected.discard(owner)

    def hold(self, descriptor: int) -> None:
        """Make forked children close `descriptor`. Call this in the step that opens it."""
        self._descriptors.add(descriptor)

    def release(self, descriptor: int) -> None:
        """Unlock and close `descriptor`, unless this is a child in which it is already closed."""
        if descriptor not in self._descriptors:
            return
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        self._descriptors.discard(descriptor)
        os.close(descriptor)

    # --- parts ---------------------------------------------------------------------------------------

    def _begin(self, deadline: Deadline, owner: ConnectionOwner | None) -> None:
        thread = threading.get_ident()
        with self._changed:
            if not self._changed.wait_for(
                lambda: not self._forking or thread in self._steps, deadline.remaining_s()
            ):
                raise StorageTimeout(f"hf3fs: a fork did not end within {deadline.timeout_s:g} s")
            self._steps[thread] += 1
            if owner is not None:
                self._busy.add(owner)

    def _end(self, owner: ConnectionOwner | None) -> None:
        thread = threading.get_ident()
        with self._changed:
            self._steps[thread] -= 1
            if not self._steps[thread]:
                del self._steps[thread]
            if owner is not None:
                self._busy.discard(owner)
            if self._forking:
                self._changed.notify_all()

    def _reset(self) -> None:
        """Make new locks, because in a child a lock of the parent may be held forever."""
        self._pid = os.getpid()
        # A signal handler may fork in the thread that holds one of these locks.
        self._fork_lock = threading.RLock()
        self._changed = threading.Condition()
        self._forking = False
        self._steps: Counter[int] = Counter()
        """How many steps each thread is running."""
        self._busy = set()

    def _before(self) -> None:
        self._fork_lock.acquire()
        with self._changed:
            self._forking = True
            own = {threading.get_ident()}
            self._changed.wait_for(lambda: self._steps.keys() <= own, WAIT_S)
            for owner in self._connected - self._busy:
                owner.disconnect()
            self._connected &= self._busy

    def _after(self) -> None:
        with self._changed:
            self._forking = False
            self._changed.notify_all()
        self._fork_lock.release()

    def _after_in_child(self) -> None:
        self._refused = self._refused or bool(self._busy or self._connected)
        self._reset()
        for owner in self._connected:
            _keep_for_ever(owner.connection)
        self._connected = set()
        for descriptor in self._descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors = set()


def _keep_for_ever(connection: object) -> None:
    """Keep `connection` open, even when the interpreter ends, because the parent uses it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


FORKS = ForkGuard()
