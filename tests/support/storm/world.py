"""A store of a storm: how to open it, what it promises, and which hazards may hit it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hicache_conformance.tools.network.proxy import FaultProxy
from servers import ServerProcess

from hicache_storage.storage import HiCacheStorage
from storm.hazards import TIMEOUT_S, Hazard

LIMIT_S = TIMEOUT_S + 1
"""How long a call on a server may take."""
_LISTEN, _TIME_WAIT = "0A", "06"


def _nothing() -> None:
    """Do nothing."""


def _none() -> list[str]:
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A store that processes share."""

    open: Callable[[], HiCacheStorage]
    hazards: tuple[Hazard, ...] = ()
    """What may happen to the store's server or disk."""
    proxy: FaultProxy | None = None
    """The proxy between the clients and the server."""
    limit_s: float | None = None
    """How long a call may take. None: nothing limits a file system."""
    retains: bool = True
    """True if an accepted page stays until it is deleted. False: the store may evict or forget it."""
    keeps_deletions: bool = True
    """True if a deleted page stays away until it is set."""
    lingers: bool = False
    """True if a set without an answer may take effect after later calls, until `settle`.

    A server of this kind goes on with requests of clients that have given up.
    """
    settle: Callable[[], None] = _nothing
    """Waits until no request of a killed process can take effect any more."""
    strays: Callable[[], list[str]] = _none
    """Returns the unpublished files that killed processes have left."""
    late_threads: int = 0
    """How many threads a library of the store starts when it first needs them, and keeps for good."""


def has_no_client(server: ServerProcess) -> bool:
    """Return whether the server has closed all its connections and finished their requests."""
    lines = Path(f"/proc/{server.pid}/net/tcp").read_text("ascii").splitlines()[1:]
    fields = [line.split() for line in lines]
    return not any(
        local.endswith(f":{server.port:04X}") and state not in (_LISTEN, _TIME_WAIT)
        for _, local, _, state, *_ in fields
    )
