"""The native client, made safe: it blocks for a minute, and crashes the process when used after its end.

Joining and closing hold the interpreter's lock, so they are only begun with a master that answers. Every
other call runs under a deadline, on a thread that may be left behind, and counts as running until it has
really ended. The native client is closed after the last of them, and never called again.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_backends.mooncake._master import Life, sign_of_life
from hicache_backends.mooncake._orphans import ORPHANS
from hicache_backends.mooncake._registered import Registered
from hicache_storage.errors import (
    ConfigError,
    HiCacheError,
    StorageClosed,
    StorageTimeout,
    StorageUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_backends.mooncake._settings import MooncakeSettings

T = TypeVar("T")

_CLOSE_LIMIT_S = 8.0
_CLOSE_BUSY_LIMIT_S = 2.0
"""With calls that are overdue: they may take a minute, and whoever is the last closes the client."""
_PAUSE_S = 0.05
_GLANCE_S = 0.2
"""To learn whether a master that did not answer is gone, or only silent."""
_LEAVE_LIMIT_S = 2.0
"""Within which the master must answer to be left."""
_MOST_OVERDUE = 64
"""Calls that may be running at once; more are refused: the store is stuck, and threads are finite."""


class MasterFailed(Exception):
    """The master did not answer a call."""


class _Deadline:
    """Until when a call may take."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())


class Client:
    """One native client, which several storages may share. Thread-safe."""

    def __init__(self, module: Any, settings: MooncakeSettings) -> None:
        self._settings = settings
        self._native = module.MooncakeDistributedStore()
        self._changed = threading.Condition()
        self._running = 0
        self._ending = False
        self._ended = Future[None]()
        self._suspect = False
        self.registered = Registered()
        self.pid = os.getpid()

    def connect(self, timeout_s: float) -> None:
        """Join the cluster.

        Raises:
            StorageUnavailable, StorageTimeout: The master cannot be reached, or does not answer.
            ConfigError: The client library refuses the config.
        """
        deadline = _Deadline(timeout_s)
        self._must_answer(deadline)
        code = self._left_behind(self._set_up, deadline)
        if code == 0:
            return
        self._ending = True  # a client that failed to set up is not even closed: that can crash
        self._native = None
        if code == -600:
            raise ConfigError(
                "mooncake: the client library refuses this config (-600): look at local_hostname,"
                " protocol, device_name and global_segment_size"
            )
        raise StorageUnavailable(f"{self._name()} cannot be joined: the client said {code}")

    def ask(self, task: Callable[[Any], T], timeout_s: float, *, borrowed: bool = False) -> T:
        """What `task` makes of the native client; again while the master fails and time is left.

        `borrowed`: the task works in a caller's memory. Then it is waited for to its end, because there
        is no calling it back, and only begun when the master has just answered.

        Raises:
            StorageUnavailable, StorageTimeout, StorageClosed.
        """
        deadline = _Deadline(timeout_s)
        while True:
            try:
                if self._suspect:
                    self._must_answer(deadline)
                    self._left_behind(_a_question, deadline)
                answer = self._here(task) if borrowed else self._left_behind(task, deadline)
            except MasterFailed:
                self._suspect = True
                if self._is_gone():
                    raise self._unavailable() from None
                if deadline.left_s < _PAUSE_S:
                    raise self._late(deadline) from None
                time.sleep(_PAUSE_S)
            else:
                self._suspect = False
                return answer

    def register(self, start: int, nbytes: int) -> bool:
        """Let the native client work in a range of this process's memory; False where it will not."""

        def register(start: int, nbytes: int) -> int:
            code: int = self._here(lambda native: native.register_buffer(start, nbytes))
            return code

        return self.registered.add(start, nbytes, register)

    def unregister(self, start: int) -> None:
        """The end of one `register` that was True."""
        self.registered.remove(
            start, lambda area: self._here(lambda native: native.unregister_buffer(area))
        )

    def close(self) -> None:
        """End it once the running calls have ended; returns in any case after some seconds."""
        with self._changed:
            begun, self._ending = self._ending, True
            idle = self._running == 0
        if begun or self.pid != os.getpid():
            return
        if idle:
            threading.Thread(target=self._end, name="hicache-mooncake-close", daemon=True).start()
        try:
            self._ended.result(_CLOSE_LIMIT_S if idle else _CLOSE_BUSY_LIMIT_S)
        except TimeoutError:
            return

    # --- parts ---------------------------------------------------------------------------------------

    def _set_up(self, native: Any) -> int:
        wanted = self._settings
        code: int = native.setup(
            wanted.local_hostname,
            wanted.metadata_server,
            wanted.global_segment_size,
            wanted.local_buffer_size,
            wanted.protocol,
            wanted.device_name,
            wanted.master_server_address,
            enable_ssd_offload=wanted.enable_ssd_offload,
            ssd_offload_path=wanted.ssd_offload_path,
            tenant_id=wanted.tenant_id,
        )
        return code

    def _must_answer(self, deadline: _Deadline) -> None:
        """The client's own health check says yes to a dead master."""
        match sign_of_life(self._settings, deadline.left_s):
            case Life.GONE:
                raise self._unavailable()
            case Life.SILENT:
                raise self._late(deadline)
            case Life.ANSWERS:
                return

    def _is_gone(self) -> bool:
        return sign_of_life(self._settings, _GLANCE_S) is Life.GONE

    def _here(self, task: Callable[[Any], T]) -> T:
        self._enter()
        try:
            return task(self._native)
        finally:
            self._leave()

    def _left_behind(self, task: Callable[[Any], T], deadline: _Deadline) -> T:
        done = Future[T]()
        self._enter()

        def run() -> None:
            try:
                result = task(self._native)
            except BaseException as error:  # noqa: BLE001 - the waiter is told, whatever it is
                self._leave()
                done.set_exception(error)
            else:
                self._leave()
                done.set_result(result)

        threading.Thread(target=run, name="hicache-mooncake", daemon=True).start()
        try:
            return done.result(deadline.left_s)
        except TimeoutError:
            self._suspect = True
            raise (self._unavailable() if self._is_gone() else self._late(deadline)) from None

    def _enter(self) -> None:
        with self._changed:
            if self._ending:
                raise StorageClosed("this MooncakeStorage was closed: open a new one")
            if self.pid != os.getpid():
                raise StorageUnavailable(
                    "a forked process cannot use its parent's Mooncake client: open a storage of its own"
                )
            if self._running >= _MOST_OVERDUE:
                raise StorageTimeout(
                    f"{self._name()}: {self._running} calls are overdue; no more until some have ended"
                )
            self._running += 1

    def _leave(self) -> None:
        with self._changed:
            self._running -= 1
            last = self._ending and self._running == 0
        if last:
            self._end()

    def _end(self) -> None:
        native, self._native = self._native, None
        if native is not None:
            if sign_of_life(self._settings, _LEAVE_LIMIT_S) is Life.ANSWERS:
                native.close()
            else:
                ORPHANS.take(native, self._settings)
        self._ended.set_result(None)

    def _name(self) -> str:
        return f"mooncake: the master at {self._settings.master_server_address}"

    def _late(self, deadline: _Deadline) -> HiCacheError:
        return StorageTimeout(
            f"{self._name()} or a peer did not answer within {deadline.timeout_s:g} s"
        )

    def _unavailable(self) -> HiCacheError:
        return StorageUnavailable(f"{self._name()} cannot be reached: is mooncake_master running?")


def _a_question(native: Any) -> None:
    sound(native.batch_is_exist(["-"]))


_FAILED = -900
_MISSING = -704
UNFINISHED = -703


def sound(codes: list[int]) -> list[int]:
    """`codes`, if the master was there to give them.

    Raises:
        MasterFailed: It was not.
    """
    if _FAILED in codes:
        raise MasterFailed
    return codes


def gone(code: int) -> bool:
    """Whether a removal's code says that there is no such page, or not yet: it is still being set."""
    return code in (0, _MISSING, UNFINISHED)
