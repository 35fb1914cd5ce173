"""A TCP proxy that makes a network fail: in front of a store's server, changed while it runs.

with FaultProxy(("127.0.0.1", 6379)) as proxy:
    storage = AcmeStorage.from_config({"url": "acme://{}:{}".format(*proxy.address)})
    proxy.go_silent()
"""

from __future__ import annotations

from typing import Self, TypeVar

from hicache_conformance.tools.network.endpoints import Endpoint, endpoints_in, redirected
from hicache_conformance.tools.network.flows import Cut, Direction, Mode
from hicache_conformance.tools.network.relay_process import HostedRelay

__all__ = ["Direction", "Endpoint", "FaultProxy", "endpoints_in", "redirected"]

_Number = TypeVar("_Number", int, float)
_BOTH: frozenset[Direction] = frozenset(("up", "down"))


class FaultProxy:
    """A proxy on a free port of 127.0.0.1 in front of `server`. Passes everything through at first.

    A mode is in force when the method that sets it returns, and replaces the mode before it. Every
    method but `close` raises `RuntimeError` after `close`; the counters stay. Thread-safe.

    Where the server does not let the proxy in, its client is let in and reset at once.

    It runs in another process, which all proxies share and which ends with this one: a client may stop
    this interpreter while it talks.
    """

    def __init__(self, server: tuple[str, int]) -> None:
        self._relay = HostedRelay(server)
        self.address: tuple[str, int] = self._relay.address
        """Where clients connect to."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections and give everything back. Idempotent."""
        self._relay.stop()

    # --- modes -----------------------------------------------------------------------------------

    def pass_through(self) -> None:
        """As if there were no proxy. What was held is delivered, on the connections that still live."""
        self._behave(Mode())

    def refuse(self) -> None:
        """Nobody can connect, and live connections are reset: a server that died."""
        self._behave(Mode(refusing=True))

    def go_silent(self, direction: Direction | None = None) -> None:
        """Accept, keep connections, deliver nothing: a server that hangs. What arrives is held.

        Only of one direction where that is given; "down": requests take effect and replies do not come.
        """
        self._behave(Mode(silent=_BOTH if direction is None else frozenset((direction,))))

    def silence_one(self) -> None:
        """The same for the one connection that carries the next request; all others pass through."""
        self._behave(Mode(silence_next=True))

    def drop_held(self) -> int:
        """Forget what is held; how many bytes that was."""
        self._must_be_open()
        return self._relay.drop_held()

    def reset_after(self, nbytes: int, *, direction: Direction = "up") -> None:
        """Deliver `nbytes` more of a direction, then reset the last one's connection, then pass through.

        0: reset the connection that carries the next bytes, before any of them is delivered.
        """
        self._behave(Mode(cut=Cut(direction, _not_negative("nbytes", nbytes), orderly=False)))

    def truncate_after(self, nbytes: int) -> None:
        """The same for replies, with an orderly end: the client reads `nbytes` bytes, then the end."""
        self._behave(Mode(cut=Cut("down", _not_negative("nbytes", nbytes), orderly=True)))

    def drip(self, nbytes_per_s: float) -> None:
        """Deliver at most so many bytes a second, in each direction of each connection."""
        if not nbytes_per_s > 0:
            raise ValueError(f"nbytes_per_s must be above 0, not {nbytes_per_s}: use go_silent")
        self._behave(Mode(nbytes_per_s=nbytes_per_s))

    def delay(self, seconds: float) -> None:
        """Deliver every byte so much later, in each direction: a round trip takes twice that longer."""
        self._behave(Mode(delay_s=_not_negative("seconds", seconds)))

    # --- counters --------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        """Connections that were let in."""
        return self._relay.counts().connections

    @property
    def bytes_up(self) -> int:
        """Bytes that were delivered to the server."""
        return self._relay.counts().nbytes["up"]

    @property
    def bytes_down(self) -> int:
        """Bytes that were delivered to clients."""
        return self._relay.counts().nbytes["down"]

    @property
    def turns(self) -> int:
        """Round trips: how often a client spoke first, or after the server, over all connections."""
        return self._relay.counts().turns

    @property
    def cuts(self) -> int:
        """Connections that `reset_after` and `truncate_after` have ended."""
        return self._relay.counts().cuts

    @property
    def held(self) -> int:
        """Bytes that have arrived and were not delivered yet."""
        return self._relay.held_nbytes()

    def _behave(self, mode: Mode) -> None:
        self._must_be_open()
        self._relay.behave(mode)

    def _must_be_open(self) -> None:
        if self._relay.stopped:
            raise RuntimeError("this FaultProxy was closed: make a new one")


def _not_negative(name: str, value: _Number) -> _Number:
    if value < 0:
        raise ValueError(f"{name} must be 0 or more, not {value}")
    return value
