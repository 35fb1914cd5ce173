"""Requests to the master for its state and its list of keys.

They bypass the native client, which would stop the interpreter while the master does not answer.
"""

from __future__ import annotations

import enum
import http.client
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.resolver import RESOLVER
from hicache_storage.errors import StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_backends.mooncake.settings import MooncakeSettings

RunOnThread: TypeAlias = "Callable[[Callable[[], tuple[int, str]], Deadline], tuple[int, str]]"
"""A function such as `Client.run_on_thread`, which abandons the work's thread at the deadline."""
_PROBE = struct.pack("<BBBBIIII", 21, 0, 0, 0, 1, 0, 0, 0)
"""An RPC call of a function that no master has. A live master refuses it."""


class MasterState(enum.Enum):
    """The state of the master's RPC port."""

    GONE = enum.auto()
    """The port refuses connections, or the host is unreachable."""
    SILENT = enum.auto()
    """The port accepts a connection, or does not refuse it, but sends no answer."""
    ANSWERS = enum.auto()


def probe_master(settings: MooncakeSettings, limit_s: float) -> MasterState:
    """Return the master's state. Look up the host name and try all addresses within `limit_s`.

    A master that is found through etcd is not probed; its state is `ANSWERS`.
    """
    if settings.master is None:
        return MasterState.ANSWERS
    deadline = Deadline(limit_s)
    try:
        found = RESOLVER.addresses(*settings.master, deadline)
    except StorageTimeout:
        return MasterState.SILENT
    except OSError:
        return MasterState.GONE
    states: list[MasterState] = []
    for family, address in found:
        states.append(_probe_address(family, address, deadline))
        if states[-1] is MasterState.ANSWERS or deadline.passed():
            break
    return MasterState.GONE if all(one is MasterState.GONE for one in states) else states[-1]


def _probe_address(family: int, address: Any, deadline: Deadline) -> MasterState:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(max(0.01, deadline.remaining_s()))
            connection.connect(address)
            connection.settimeout(max(0.01, deadline.remaining_s()))
            connection.sendall(_PROBE)
            connection.recv(1)  # if it closes the connection, the master is alive, too
    except TimeoutError:
        return MasterState.SILENT
    except OSError:
        return MasterState.GONE
    return MasterState.ANSWERS


def list_keys(
    settings: MooncakeSettings, prefix: str, deadline: Deadline, *, run_on_thread: RunOnThread
) -> list[str]:
    """Return every key of the cluster that begins with `prefix`, from the master's HTTP port.

    The list is read on a thread that is abandoned at the deadline, because the time limit of
    http.client applies to each read and not to the whole answer, and a name lookup has no limit.

    Raises:
        StorageUnavailable, StorageTimeout: The port does not answer.
    """
    host = settings.master[0] if settings.master else ""
    address = f"{host}:{settings.master_metrics_port}"
    connection = http.client.HTTPConnection(
        host, settings.master_metrics_port, timeout=deadline.remaining_s() or 0.01
    )
    opened: list[socket.socket] = []

    def read() -> tuple[int, str]:
        try:
            connection.connect()
            opened.append(connection.sock)
            connection.request("GET", "/get_all_keys")
            with connection.getresponse() as answer:  # it holds the socket open, too
                return answer.status, answer.read().decode("utf-8", "replace")
        finally:
            connection.close()

    try:
        status, text = run_on_thread(read, deadline)
    except TimeoutError:
        for sock in opened:  # shutting the socket down ends the thread
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        raise StorageTimeout(
            f"mooncake: the master's list of keys at {address} did not come within"
            f" {deadline.timeout_s:g} s"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, StorageUnavailable):
            raise
        raise StorageUnavailable(
            f"mooncake: the master's list of keys at {address} cannot be read ({type(error).__name__}):"
            " is master_metrics_port its --metrics_port?"
        ) from None
    if status != http.client.OK:
        raise StorageUnavailable(f"mooncake: {address} answered HTTP {status} to a list of keys")
    return [key for key in text.splitlines() if key.startswith(prefix)]
