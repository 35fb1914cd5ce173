"""The master's HTTP port: its list of keys."""

from __future__ import annotations

import http.client
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from hicache_storage.errors import StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from hicache_backends.mooncake.client import Client
    from hicache_backends.mooncake.settings import MooncakeSettings
    from hicache_storage.backend_support.deadline import Deadline


def keys(client: Client, settings: MooncakeSettings, prefix: str, deadline: Deadline) -> list[str]:
    """Return every key of the cluster that begins with `prefix`.

    It is read on a thread that is left behind at the deadline, because http.client's limit is for each
    piece of the answer, and a name look-up has none.

    Raises:
        StorageUnavailable, StorageTimeout: The port does not answer.
    """
    host = settings.master[0] if settings.master else ""
    place = f"{host}:{settings.master_metrics_port}"
    connection = http.client.HTTPConnection(
        host, settings.master_metrics_port, timeout=deadline.remaining_s() or 0.01
    )

    opened: list[socket.socket] = []

    def read() -> tuple[int, str]:
        try:
            connection.connect()
            opened.append(connection.sock)
            connection.request("GET", "/get_all_keys")
            answer = connection.getresponse()
            return answer.status, answer.read().decode("utf-8", "replace")
        finally:
            connection.close()

    try:
        status, text = client.beside(read, deadline)
    except TimeoutError:
        for sock in opened:  # which ends the thread
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        raise StorageTimeout(
            f"mooncake: the master's list of keys at {place} did not come within"
            f" {deadline.timeout_s:g} s"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, StorageUnavailable):
            raise
        raise StorageUnavailable(
            f"mooncake: the master's list of keys at {place} cannot be read ({type(error).__name__}):"
            " is master_metrics_port its --metrics_port?"
        ) from None
    if status != http.client.OK:
        raise StorageUnavailable(f"mooncake: {place} answered HTTP {status} to a list of keys")
    return [key for key in text.splitlines() if key.startswith(prefix)]
