"""A guard for the native client, which may block for a minute, and crashes if used after its close.

Joining, and closing a client that lends memory, hold the interpreter's lock for as long as the master
takes, so they begin only while the master answers. Every other call has a deadline. At the deadline its
thread is abandoned, but the call counts as running until it returns. After the last running call the
native client is closed and never called again.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_backends.mooncake.lifecycle import (
    DEFERRED_CLOSES,
    close_at_exit,
    ensure_library_usable,
)
from hicache_backends.mooncake.master import MasterState, probe_master
from hicache_backends.mooncake.memory import RegisteredMemory
from hicache_storage.backend_support.shared_resource import CallGate
from hicache_storage.backend_support.single_flight import SingleFlight
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

_RPC_FAILED = -900
_INVALID_CONFIG = -600
_CLOSE_LIMIT_S = 8.0
_CLOSE_BUSY_LIMIT_S = 2.0
"""The time limit of `close` while calls are running.

Such calls may take a minute; the last one to end closes the client.
"""
_PAUSE_S = 0.05
_GONE_CHECK_S = 0.2
"""The time to find out whether a master that did not answer is gone or silent."""
_LEAVE_PROBE_S = 2.0
"""The time in which the master must answer before the client is closed."""
_MAX_RUNNING = 64
"""How many calls may run. Further calls are refused, because each may hold a thread."""


class MasterFailed(Exception):
    """The master did not answer a call."""


class TransferOverdue(Exception):
    """The native client gave up a transfer, which still goes on if the peer goes on."""


def checked(codes: list[int]) -> list[int]:
    """Return the codes of a native call.

    Raises:
        MasterFailed: A code says that the master did not answer.
    """
    if _RPC_FAILED in codes:
        raise MasterFailed
    return codes


class Client:
    """A native client, which several storages may share. Thread-safe."""

    def __init__(self, module: Any, settings: MooncakeSettings) -> None:
        ensure_library_usable()
        self.pid = os.getpid()
        self.registered = RegisteredMemory()
        self._settings = settings
        self._native = module.MooncakeDistributedStore()
        self._gate = CallGate()
        self._closed = Future[None]()
        self._ended = Future[None]()
        """Done when the native client moves no byte any more."""
        self.retired = False
        """True if the native client must be replaced, because a transfer of it is overdue."""
        self._is_suspect = False
        self._has_joined = False
        close_at_exit(self)

    def connect(self, deadline: Deadline) -> None:
        """Join the cluster.

        Raises:
            StorageUnavailable, StorageTimeout: The master cannot be reached or does not answer.
            ConfigError: The client library refuses the config.
        """
        try:
            self._ensure_master_answers(deadline)
            code = self._run_abandonable(self._set_up, deadline)
        except BaseException:
            # A setup that is still running leaves the cluster after it has joined.
            self.close(deadline.remaining_s())
            raise
        if code == 0:
            return
        self.close()
        if code == _INVALID_CONFIG:
            raise ConfigError(
                "mooncake: the client library refuses this config (-600): check local_hostname,"
                " protocol, device_name and global_segment_size"
            )
        raise StorageUnavailable(f"{self._name()} cannot be joined: the client returned {code}")

    def call(self, task: Callable[[Any], T], deadline: Deadline, *, borrowed: bool = False) -> T:
        """Run `task(native)` and return its result. Repeat it while the master fails and time is left.

        `borrowed`: the task uses memory of the caller, so it cannot be abandoned. It begins only
        after the master has answered, and runs to its end.

        Raises:
            StorageUnavailable, StorageTimeout, StorageClosed.
        """
        while True:
            try:
                if self._is_suspect:
                    self._ensure_master_answers(deadline)
                    self._run_abandonable(_ping, deadline)
                result = self._run(task) if borrowed else self._run_abandonable(task, deadline)
            except MasterFailed:
                self._is_suspect = True
                if self._is_gone():
                    raise self._unavailable_error() from None
                if deadline.remaining_s() < _PAUSE_S:
                    raise self._timeout_error(deadline) from None
                time.sleep(_PAUSE_S)
            else:
                self._is_suspect = False
                return result

    def run_on_thread(self, work: Callable[[], T], deadline: Deadline) -> T:
        """Run `work()` on a thread that is abandoned at the deadline. Return its result.

        Raises:
            TimeoutError: The work is still running.
            StorageUnavailable, StorageTimeout, StorageClosed: The work was not begun.
        """
        self._enter()
        try:
            ended = SingleFlight("hicache-mooncake", lambda: self._counted(work)).wait(
                deadline.remaining_s()
            )
        except StorageUnavailable:  # the system cannot start another thread
            self._leave()
            raise
        if ended is None:
            raise TimeoutError("the call still runs")
        return ended.result()

    def register(self, start: int, nbytes: int) -> bool:
        """Register a range of this process's memory. Return False if the native client refuses it."""

        def register(start: int, nbytes: int) -> int:
            code: int = self._run(lambda native: native.register_buffer(start, nbytes))
            return code

        self._ensure_own_process()
        return self.registered.add(start, nbytes, register)

    def unregister(self, start: int) -> None:
        """Undo one `register` that returned True."""
        self.registered.remove(
            start, lambda area: self._run(lambda native: native.unregister_buffer(area))
        )

    def close(self, limit_s: float = _CLOSE_LIMIT_S) -> None:
        """Close the native client after the running calls. Return within `limit_s` in any case."""
        if self.pid != os.getpid() or self._gate.closed:
            return
        is_idle = self._gate.close()
        if is_idle:
            threading.Thread(
                target=self._close_native, name="hicache-mooncake-close", daemon=True
            ).start()
        try:
            self._closed.result(limit_s if is_idle else min(limit_s, _CLOSE_BUSY_LIMIT_S))
        except TimeoutError:
            return

    def is_busy(self) -> bool:
        """Return True while a native call, or the close of the native client, is running."""
        return self._gate.calls > 0 or (self._gate.closed and not self._closed.done())

    def native(self) -> object:
        """Return the native client, so that you can hold a reference. Do not call its methods."""
        return self._native

    # --- parts ---------------------------------------------------------------------------------------

    def _set_up(self, native: Any) -> int:
        settings = self._settings
        code: int = native.setup(
            settings.local_hostname,
            settings.metadata_server,
            settings.global_segment_size,
            settings.local_buffer_size,
            settings.protocol,
            settings.device_name,
            settings.master_server_address,
            enable_ssd_offload=settings.enable_ssd_offload,
            ssd_offload_path=settings.ssd_offload_path,
            tenant_id=settings.tenant_id,
        )
        self._has_joined = code == 0
        return code

    def _ensure_master_answers(self, deadline: Deadline) -> None:
        """Probe the master, because the native health check succeeds even if the master is dead."""
        match probe_master(self._settings, deadline.remaining_s()):
            case MasterState.GONE:
                raise self._unavailable_error()
            case MasterState.SILENT:
                raise self._timeout_error(deadline)
            case MasterState.ANSWERS:
                return

    def _is_gone(self) -> bool:
        return probe_master(self._settings, _GONE_CHECK_S) is MasterState.GONE

    def _run(self, task: Callable[[Any], T]) -> T:
        self._enter()
        return self._counted(lambda: self._translated(task))

    def _counted(self, work: Callable[[], T]) -> T:
        """Run `work()`, and end its call.

        If a transfer is overdue, the call keeps its memory until the native client is closed, because
        bytes move for as long as the client is open. A client that lends memory waits for the master.
        """
        try:
            try:
                return work()
            finally:
                self._leave()
        except TransferOverdue:
            self.retired = True
            if self._gate.close():
                self._close_native()
            self._ended.result()
            raise StorageTimeout(
                f"{self._name()}: a peer did not answer for so long that the client was replaced"
            ) from None

    def _run_abandonable(self, task: Callable[[Any], T], deadline: Deadline) -> T:
        try:
            return self.run_on_thread(lambda: self._translated(task), deadline)
        except HiCacheError:  # the task raised it, or was not begun
            raise
        except TimeoutError:
            self._is_suspect = True
            error = self._unavailable_error() if self._is_gone() else self._timeout_error(deadline)
            raise error from None

    def _translated(self, task: Callable[[Any], T]) -> T:
        """Run a task, and translate exceptions of the library."""
        try:
            return task(self._native)
        except (HiCacheError, MasterFailed, TransferOverdue):
            raise
        except Exception as error:  # noqa: BLE001 - the library may raise anything
            raise StorageUnavailable(
                f"{self._name()}: the client library failed ({type(error).__name__})"
            ) from None

    def _ensure_own_process(self) -> None:
        """Refuse a forked child before taking a lock, which a thread of the parent may have held."""
        if self.pid != os.getpid():
            raise StorageUnavailable(FORKED)

    def _enter(self) -> None:
        self._ensure_own_process()
        if self._gate.calls >= _MAX_RUNNING:
            raise StorageTimeout(
                f"{self._name()}: {_MAX_RUNNING} calls are overdue, so no others are made until"
                " some have ended"
            )
        if not self._gate.begin():
            if self.retired:
                raise StorageUnavailable(
                    f"{self._name()}: the client is being replaced, because a peer did not answer"
                )
            raise StorageClosed("this MooncakeStorage was closed: open a new one")

    def _leave(self) -> None:
        if self._gate.end():
            self._close_native()

    def _close_native(self) -> None:
        native, self._native = self._native, None
        try:
            if native is None or not self._has_joined:
                return  # closing a client whose setup failed can crash
            if (
                not self._settings.lends
                or probe_master(self._settings, _LEAVE_PROBE_S) is MasterState.ANSWERS
            ):
                native.close()
                self._ended.set_result(None)
            else:
                DEFERRED_CLOSES.add(native, self._settings, self._ended)
        finally:
            self._closed.set_result(None)

    def _name(self) -> str:
        return f"mooncake: the master at {self._settings.master_server_address}"

    def _timeout_error(self, deadline: Deadline) -> HiCacheError:
        return StorageTimeout(
            f"{self._name()} or a peer did not answer within {deadline.timeout_s:g} s"
        )

    def _unavailable_error(self) -> HiCacheError:
        return StorageUnavailable(f"{self._name()} cannot be reached: is mooncake_master running?")


def _ping(native: Any) -> None:
    checked(native.batch_is_exist(["-"]))
