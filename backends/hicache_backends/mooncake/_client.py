"""The native client, made safe: it blocks for a minute, and crashes the process when used after its end.

Joining and closing hold the interpreter's lock, so they are only begun with a master that answers. Every
other call runs under a deadline, on a thread that may be left behind, and counts as running until it has
really ended. The native client is closed after the last of them, and never called again.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_backends.mooncake import _listing
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
_MOST_OVERDUE = 64
"""Calls that may be running at once; more are refused: the store is stuck, and threads are finite."""


_UNCLOSED: list[Any] = []
"""Clients whose master was gone at their end: closing one would stop the interpreter for as long."""


class MasterFailed(Exception):
    """The master did not answer a call."""


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

    def connect(self) -> None:
        """Join the cluster.

        Raises:
            StorageUnavailable, StorageTimeout: The master cannot be reached, or does not answer.
            ConfigError: The client library refuses the config.
        """
        if not self._master_listens():
            raise self._unavailable()
        if _listing.hangs(self._settings):
            raise self._late()
        code = self._left_behind(self._set_up, self._deadline_s())
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

    def ask(self, task: Callable[[Any], T], *, borrowed: bool = False) -> T:
        """What `task` makes of the native client; again while the master fails and time is left.

        `borrowed`: the task works in a caller's memory. Then it is waited for to its end, because there
        is no calling it back, and only begun when the master has just answered.

        Raises:
            StorageUnavailable, StorageTimeout, StorageClosed.
        """
        deadline_s = self._deadline_s()
        while True:
            try:
                if self._suspect:
                    self._see_master(deadline_s)
                answer = self._here(task) if borrowed else self._left_behind(task, deadline_s)
            except MasterFailed:
                self._suspect = True
                if not self._master_listens():
                    raise self._unavailable() from None
                if time.monotonic() + _PAUSE_S > deadline_s:
                    raise self._late() from None
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

    def _see_master(self, deadline_s: float) -> None:
        """Have a real answer of the master: the client's own health check says yes to a dead one."""
        if not self._master_listens():
            raise self._unavailable()
        self._left_behind(lambda native: sound(native.batch_is_exist(["-"])), deadline_s)

    def _here(self, task: Callable[[Any], T]) -> T:
        self._enter()
        try:
            return task(self._native)
        finally:
            self._leave()

    def _left_behind(self, task: Callable[[Any], T], deadline_s: float) -> T:
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
            return done.result(max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            self._suspect = True
            raise (self._late() if self._master_listens() else self._unavailable()) from None

    def _enter(self) -> None:
        with self._changed:
            if self._ending:
                raise StorageClosed("this MooncakeStorage was closed: open a new one")
            if self.pid != os.getpid():
                raise StorageUnavailable(
                    "a forked process cannot use its parent's Mooncake client: open a storage of its own"
                )
            if self._running >= _MOST_OVERDUE:
                raise self._late()
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
            if self._master_listens() and not _listing.hangs(self._settings):
                native.close()
            else:
                _UNCLOSED.append(native)
        self._ended.set_result(None)

    def _master_listens(self) -> bool:
        """Whether someone accepts connections there; where etcd knows the master, it is not asked."""
        if self._settings.master is None:
            return True
        try:
            socket.create_connection(
                self._settings.master, timeout=min(1.0, self._settings.timeout_s)
            ).close()
        except TimeoutError:
            return True
        except OSError:
            return False
        return True

    def _deadline_s(self) -> float:
        return time.monotonic() + self._settings.timeout_s

    def _name(self) -> str:
        return f"mooncake: the master at {self._settings.master_server_address}"

    def _late(self) -> HiCacheError:
        return StorageTimeout(
            f"{self._name()} or a peer did not answer within {self._settings.timeout_s:g} s"
        )

    def _unavailable(self) -> HiCacheError:
        return StorageUnavailable(f"{self._name()} cannot be reached: is mooncake_master running?")


_FAILED = -900
_MISSING = -704


def sound(codes: list[int]) -> list[int]:
    """`codes`, if the master was there to give them.

    Raises:
        MasterFailed: It was not.
    """
    if _FAILED in codes:
        raise MasterFailed
    return codes


def gone(code: int) -> bool:
    """Whether a removal's code says that the object is not there any more."""
    return code in (0, _MISSING)
