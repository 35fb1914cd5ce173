"""The native client, made safe: it blocks for a minute, and crashes the process when used after its end.

Joining and closing hold the interpreter's lock, so they are only begun with a master that answers. Every
other call runs under a deadline, on a thread that may be left behind, and counts as running until it has
really ended. The native client is closed after the last of them, and never called again.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_backends.mooncake.deferred_closes import DEFERRED_CLOSES
from hicache_backends.mooncake.exit import guard, must_be_usable
from hicache_backends.mooncake.master import Life, sign_of_life
from hicache_backends.mooncake.memory import Registered
from hicache_storage.errors import (
    ConfigError,
    HiCacheError,
    StorageClosed,
    StorageTimeout,
    StorageUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_backends.mooncake.settings import MooncakeSettings
    from hicache_storage.backend_support.deadline import Deadline

T = TypeVar("T")

FORKED = "a forked process cannot use its parent's Mooncake client, nor open one: use spawn"

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


class Client:
    """One native client, which several storages may share. Thread-safe."""

    def __init__(self, module: Any, settings: MooncakeSettings) -> None:
        must_be_usable()
        self.pid = os.getpid()
        self._settings = settings
        self._native = module.MooncakeDistributedStore()
        self._changed = threading.Condition()
        self._running = 0
        self._ending = False
        self._ended = Future[None]()
        self._suspect = False
        self.registered = Registered()
        self._has_joined = False
        guard(self)

    def connect(self, deadline: Deadline) -> None:
        """Join the cluster.

        Raises:
            StorageUnavailable, StorageTimeout: The master cannot be reached, or does not answer.
            ConfigError: The client library refuses the config.
        """
        try:
            self._must_answer(deadline)
            code = self._left_behind(self._set_up, deadline)
        except BaseException:
            self.close()  # what still runs leaves the cluster when it has joined after all
            raise
        if code == 0:
            return
        self.close()
        if code == -600:
            raise ConfigError(
                "mooncake: the client library refuses this config (-600): look at local_hostname,"
                " protocol, device_name and global_segment_size"
            )
        raise StorageUnavailable(f"{self._name()} cannot be joined: the client said {code}")

    def ask(self, task: Callable[[Any], T], deadline: Deadline, *, borrowed: bool = False) -> T:
        """Return what `task` makes of the native client; again while the master fails and time is left.

        `borrowed`: the task works in a caller's memory. Then it is waited for to its end, because there
        is no calling it back, and only begun when the master has just answered.

        Raises:
            StorageUnavailable, StorageTimeout, StorageClosed.
        """
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
                if deadline.remaining_s() < _PAUSE_S:
                    raise self._late(deadline) from None
                time.sleep(_PAUSE_S)
            else:
                self._suspect = False
                return answer

    def beside(self, work: Callable[[], T], deadline: Deadline) -> T:
        """Return what `work` returns, from a thread that is left behind at the deadline.

        Raises:
            TimeoutError: It goes on.
            StorageUnavailable, StorageTimeout, StorageClosed: It was not begun.
        """
        done = Future[T]()
        self._enter()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - the waiter is told, whatever it is
                self._leave()
                done.set_exception(error)
            else:
                self._leave()
                done.set_result(result)

        try:
            threading.Thread(target=run, name="hicache-mooncake", daemon=True).start()
        except RuntimeError:
            self._leave()
            raise StorageUnavailable(
                f"{self._name()}: the system has no thread for a call"
            ) from None
        if not wait([done], deadline.remaining_s()).done:
            raise TimeoutError("the call goes on")
        return done.result()

    def register(self, start: int, nbytes: int) -> bool:
        """Let the native client work in a range of this process's memory; False where it will not."""

        def register(start: int, nbytes: int) -> int:
            code: int = self._here(lambda native: native.register_buffer(start, nbytes))
            return code

        self._must_be_of_this_process()
        return self.registered.add(start, nbytes, register)

    def unregister(self, start: int) -> None:
        """The end of one `register` that was True."""
        self.registered.remove(
            start, lambda area: self._here(lambda native: native.unregister_buffer(area))
        )

    def close(self) -> None:
        """End it once the running calls have ended; returns in any case after some seconds."""
        if self.pid != os.getpid():
            return
        with self._changed:
            begun, self._ending = self._ending, True
            idle = self._running == 0
        if begun:
            return
        if idle:
            threading.Thread(target=self._end, name="hicache-mooncake-close", daemon=True).start()
        try:
            self._ended.result(_CLOSE_LIMIT_S if idle else _CLOSE_BUSY_LIMIT_S)
        except TimeoutError:
            return

    def is_busy(self) -> bool:
        """Return True while a native call runs, or the end of the client."""
        return self._running > 0 or (self._ending and not self._ended.done())

    def native(self) -> object:
        """Return the native client, for nothing but to keep it."""
        return self._native

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
        self._has_joined = code == 0
        return code

    def _must_answer(self, deadline: Deadline) -> None:
        """The client's own health check says yes to a dead master."""
        match sign_of_life(self._settings, deadline.remaining_s()):
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
            return self._done(task)
        finally:
            self._leave()

    def _left_behind(self, task: Callable[[Any], T], deadline: Deadline) -> T:
        try:
            return self.beside(lambda: self._done(task), deadline)
        except HiCacheError:  # of the task, or it was not begun
            raise
        except TimeoutError:
            self._suspect = True
            raise (self._unavailable() if self._is_gone() else self._late(deadline)) from None

    def _done(self, task: Callable[[Any], T]) -> T:
        try:
            return task(self._native)
        except (HiCacheError, MasterFailed):
            raise
        except Exception as error:  # noqa: BLE001 - whatever the library raises ends here
            raise StorageUnavailable(
                f"{self._name()}: the client library failed ({type(error).__name__})"
            ) from None

    def _must_be_of_this_process(self) -> None:
        """Refuse before any lock is taken: a thread of the parent may have held it."""
        if self.pid != os.getpid():
            raise StorageUnavailable(FORKED)

    def _enter(self) -> None:
        self._must_be_of_this_process()
        with self._changed:
            if self._ending:
                raise StorageClosed("this MooncakeStorage was closed: open a new one")
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
        try:
            if native is None or not self._has_joined:
                return  # a client that failed to set up is not even closed: that can crash
            if sign_of_life(self._settings, _LEAVE_LIMIT_S) is Life.ANSWERS:
                native.close()
            else:
                DEFERRED_CLOSES.take(native, self._settings)
        finally:
            self._ended.set_result(None)

    def _name(self) -> str:
        return f"mooncake: the master at {self._settings.master_server_address}"

    def _late(self, deadline: Deadline) -> HiCacheError:
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
