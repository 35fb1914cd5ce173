"""Loopback ports of the servers that a benchmark starts."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack

_READY_LIMIT_S = 20.0
_POLL_S = 0.02


def free_ports(count: int) -> list[int]:
    """Return `count` ports that nobody listened on just now."""
    with ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [listener.getsockname()[1] for listener in listeners]


def wait_for(port: int) -> None:
    """Return when a server listens on `port`.

    Raises:
        OSError: No server listened within the time limit.
    """
    until_s = time.monotonic() + _READY_LIMIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(_POLL_S)
        else:
            return
