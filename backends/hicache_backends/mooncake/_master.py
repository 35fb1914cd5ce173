"""Whether the master answers, asked without the native client, which would stop the interpreter."""

from __future__ import annotations

import enum
import socket
import struct
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_backends.mooncake._settings import MooncakeSettings

_QUESTION = struct.pack("<BBBBIIII", 21, 0, 0, 0, 1, 0, 0, 0)
"""A call of a function that no master has, as its RPC port reads one; to refuse it, it must be alive."""


class Life(enum.Enum):
    """What the master's RPC port does."""

    GONE = enum.auto()
    """It refuses connections, or no way leads there."""
    SILENT = enum.auto()
    """It accepts, or seems to, and says nothing."""
    ANSWERS = enum.auto()


def sign_of_life(settings: MooncakeSettings, limit_s: float) -> Life:
    """What the master does within `limit_s`. Where etcd knows the master, it is taken to answer."""
    if settings.master is None:
        return Life.ANSWERS
    until_s = time.monotonic() + limit_s
    try:
        with socket.create_connection(settings.master, timeout=limit_s) as connection:
            connection.sendall(_QUESTION)
            connection.settimeout(max(0.01, until_s - time.monotonic()))
            connection.recv(1)  # an end is an answer too, of a master that reads calls another way
    except TimeoutError:
        return Life.SILENT
    except OSError:
        return Life.GONE
    return Life.ANSWERS
