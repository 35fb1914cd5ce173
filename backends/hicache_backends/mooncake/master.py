"""Whether the master answers, asked without the native client, which would stop the interpreter."""

from __future__ import annotations

import enum
import socket
import struct
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.single_flight import SingleFlight

if TYPE_CHECKING:
    from hicache_backends.mooncake.settings import MooncakeSettings

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
    """Return what the master does within `limit_s`: the name look-up and every address included.

    Where etcd knows the master, it is taken to answer.
    """
    if settings.master is None:
        return Life.ANSWERS
    deadline = Deadline(limit_s)
    try:
        found = _NAMES.addresses(settings.master, deadline)
    except OSError:
        return Life.GONE
    lives = [Life.SILENT] if found is None else []
    for family, *_, address in found or ():
        lives.append(_answers(family, address, deadline))
        if lives[-1] is Life.ANSWERS or deadline.passed():
            break
    return Life.GONE if all(life is Life.GONE for life in lives) else lives[-1]


def _answers(family: int, address: Any, deadline: Deadline) -> Life:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(max(0.01, deadline.remaining_s()))
            connection.connect(address)
            connection.settimeout(max(0.01, deadline.remaining_s()))
            connection.sendall(_QUESTION)
            connection.recv(1)  # an end is an answer too, of a master that reads calls another way
    except TimeoutError:
        return Life.SILENT
    except OSError:
        return Life.GONE
    return Life.ANSWERS


class _Names:
    """Looks up masters: at most one look-up in flight for each. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._look_ups: dict[tuple[str, int], SingleFlight[list[Any]]] = {}

    def addresses(self, master: tuple[str, int], deadline: Deadline) -> list[Any] | None:
        """Return what `getaddrinfo` finds; None where it still runs at the deadline.

        Raises:
            OSError: The name leads nowhere.
        """
        with self._lock:
            look_up = self._look_ups.get(master)
            if look_up is None:
                find = partial(socket.getaddrinfo, *master, type=socket.SOCK_STREAM)
                look_up = self._look_ups[master] = SingleFlight("hicache-master-lookup", find)
        ended = look_up.wait(deadline.remaining_s())
        return None if ended is None else ended.result()

    def forget(self) -> None:
        """In a forked child: its parent's look-ups are not in flight here."""
        self._lock = threading.Lock()
        self._look_ups = {}


_NAMES = _Names()
forget_names = _NAMES.forget
