"""A TCP proxy in front of a store's server that makes the network fail.

with FaultProxy(("127.0.0.1", 6379)) as proxy:
    storage = AcmeStorage.from_config({"url": "acme://{}:{}".format(*proxy.address)})
    proxy.go_silent()
"""

from __future__ import annotations

from typing import Self, TypeVar

from hicache_conformance.tools.network.endpoints import Endpoint, endpoints_in, redirected
from hicache_conformance.tools.network.flows import Cut, Direction, Flip, HangUp, Mode
from hicache_conformance.tools.network.relay_process import HostedRelay

__all__ = ["Direction", "Endpoint", "FaultProxy", "endpoints_in", "redirected"]

_Number = TypeVar("_Number", int, float)
_BOTH: frozenset[Direction] = frozenset(("up", "down"))


class FaultProxy:
    """A proxy on a free port of 127.0.0.1 in front of `server`. At first everything passes through.

    A mode is in force when the method that sets it returns, and replaces the mode before it. After
    `close`, every other method raises `RuntimeError`, but the counters stay. Thread-safe.

    If the server does not accept the proxy, the proxy accepts its client and resets the connection
    at once.

    The proxy runs in another process, because a client may stop this interpreter while it waits for
    its server. All proxies share that process, which ends with this one.
    """

    def __init__(self, server: tuple[str, int]) -> None:
        self._relay = HostedRelay(server)
        self.address: tuple[str, int] = self._relay.address
        """The address for clients."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections and release everything. Idempotent."""
        self._relay.stop()

    # --- modes -----------------------------------------------------------------------------------

    def pass_through(self) -> None:
        """Let everything pass, and deliver the held bytes of connections that are still open."""
        self._behave(Mode())

    def refuse(self) -> None:
        """Refuse new connections and reset open ones, like a server that died."""
        self._behave(Mode(refusing=True))

    def go_silent(self, direction: Direction | None = None) -> None:
        """Accept and keep connections, but deliver nothing, like a server that hangs.

        Bytes that arrive are held. With a `direction`, only that one is silent: with "down",
        requests take effect but replies do not come.
        """
        self._behave(Mode(silent=_BOTH if direction is None else frozenset((direction,))))

    def silence_one(self) -> None:
        """Silence the connection that carries the next request. All others pass through."""
        self._behave(Mode(silence_next=True))

    def drop_held(self) -> int:
        """Drop the held bytes and return their number."""
        self._must_be_open()
        return self._relay.drop_held()

    def reset_after(self, nbytes: int, *, direction: Direction = "up") -> None:
        """Deliver `nbytes` more of a direction, reset the last byte's connection, then pass through.

        With 0, the connection that carries the next bytes is reset before any of them is delivered.
        """
        self._behave(Mode(cut=Cut(direction, _not_negative("nbytes", nbytes), orderly=False)))

    def silence_after(self, nbytes: int) -> None:
        """Deliver `nbytes` more of requests, then go silent, as if the client had died."""
        nbytes = _not_negative("nbytes", nbytes)
        self._behave(Mode(cut=Cut("up", nbytes, orderly=False, silences=True)))

    def deliver_late_after(self, requests: int) -> None:
        """Let this many pieces of requests pass, and reset the client that sends the next one.

        The server gets that piece when another mode is set. Everything else passes through.
        """
        self._behave(Mode(hang_up=HangUp(_not_negative("requests", requests))))

    def truncate_after(self, nbytes: int) -> None:
        """Deliver `nbytes` more of replies, end their connection without a reset, then pass through."""
        self._behave(Mode(cut=Cut("down", _not_negative("nbytes", nbytes), orderly=True)))

    def flip_after(self, nbytes: int, *, direction: Direction = "down") -> None:
        """Deliver `nbytes` more of a direction, invert one bit of the next byte, then pass through.

        TCP's own checksum does not notice, as if a host's memory or network card were broken.
        """
        self._behave(Mode(flip=Flip(direction, _not_negative("nbytes", nbytes))))

    def drip(self, nbytes_per_s: float) -> None:
        """Deliver at most `nbytes_per_s` in each direction of each connection."""
        if not nbytes_per_s > 0:
            raise ValueError(f"nbytes_per_s must be above 0, not {nbytes_per_s}: use go_silent")
        self._behave(Mode(nbytes_per_s=nbytes_per_s))

    def delay(self, seconds: float) -> None:
        """Deliver every byte `seconds` later each way, so a round trip takes `2 * seconds` longer."""
        self._behave(Mode(delay_s=_not_negative("seconds", seconds)))

    # --- counters --------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        """How many connections were accepted."""
        return self._relay.counts().connections

    @property
    def bytes_up(self) -> int:
        """How many bytes were delivered to the server."""
        return self._relay.counts().nbytes["up"]

    @property
    def bytes_down(self) -> int:
        """How many bytes were delivered to clients."""
        return self._relay.counts().nbytes["down"]

    @property
    def turns(self) -> int:
        """How many round trips there were: times when a client sent first, or after the server."""
        return self._relay.counts().turns

    @property
    def cuts(self) -> int:
        """How many connections `reset_after` and `truncate_after` have ended."""
        return self._relay.counts().cuts

    @property
    def flips(self) -> int:
        """How many bits `flip_after` has inverted."""
        return self._relay.counts().flips

    @property
    def held(self) -> int:
        """How many bytes have arrived and were not delivered yet."""
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
