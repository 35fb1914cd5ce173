"""Relays in a process of their own, so that a client that stops this interpreter does not stop them.

Native clients of stores hold the interpreter's lock while they wait for their server, some for
seconds. A proxy in a thread of this process could not run during that time. One relay process serves
all proxies of this process, and ends with it.
"""

from __future__ import annotations

import atexit
import copy
import os
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

from hicache_conformance.tools.network.relay import Relay
from hicache_conformance.tools.processes.interpreter import start_interpreter

if TYPE_CHECKING:
    from hicache_conformance.tools.network.flows import Counts, Mode

_END_LIMIT_S = 10.0


class HostedRelay:
    """One relay in the other process. Thread-safe."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._host = _host()
        self._number: int
        self.address: tuple[str, int]
        self._number, self.address = self._host.call("open", server)
        self._lock = threading.Lock()
        self._last: Counts | None = None

    @property
    def stopped(self) -> bool:
        return self._last is not None

    def behave(self, mode: Mode) -> None:
        """Switch to `mode`."""
        self._host.call("behave", self._number, mode)

    def drop_held(self) -> int:
        """Drop the bytes that were received and not yet sent on. Return how many they were."""
        dropped: int = self._host.call("drop_held", self._number)
        return dropped

    def held_nbytes(self) -> int:
        """Return how many bytes were received and not yet sent on."""
        with self._lock:
            held: int = 0 if self._last else self._host.call("held_nbytes", self._number)
            return held

    def counts(self) -> Counts:
        """Return the counters. After `stop`, return their last values."""
        with self._lock:
            counts: Counts = self._last or self._host.call("counts", self._number)
            return counts

    def stop(self) -> None:
        """End the relay and its connections. Idempotent."""
        with self._lock:
            if self._last is None:
                self._last = self._host.call("stop", self._number)


class _Host:
    """The parent's side of the process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._connection, child_end = Pipe()
        with child_end:
            self._process = start_interpreter(__name__, child_end)
        atexit.register(self.close)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method in the other process. Return its result, or raise its exception."""
        with self._lock:
            self._connection.send((method, *arguments))
            answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process. In a forked child, leave it to the parent."""
        if self.pid == os.getpid():
            self._connection.close()
            try:
                self._process.wait(_END_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()


_hosts: list[_Host] = []
_starting = threading.Lock()


def _host() -> _Host:
    """Return the process that serves the proxies of this process. Start it if there is none."""
    with _starting:
        if not _hosts or _hosts[-1].pid != os.getpid():
            _hosts.append(_Host())
        return _hosts[-1]


class _RelayServer:
    """The methods that the parent calls, in the other process."""

    def __init__(self) -> None:
        self._relays: dict[int, Relay] = {}
        self._opened = 0

    def open(self, server: tuple[str, int]) -> tuple[int, tuple[str, int]]:
        relay = Relay(server)
        self._opened += 1
        self._relays[self._opened] = relay
        return self._opened, relay.address

    def behave(self, number: int, mode: Mode) -> None:
        relay = self._relays[number]
        relay.call_in_loop(lambda: relay.behave(mode))

    def drop_held(self, number: int) -> int:
        relay = self._relays[number]
        return relay.call_in_loop(relay.drop_held)

    def held_nbytes(self, number: int) -> int:
        relay = self._relays[number]
        return relay.call_in_loop(relay.held_nbytes)

    def counts(self, number: int) -> Counts:
        relay = self._relays[number]
        return relay.call_in_loop(lambda: copy.deepcopy(relay.counts))

    def stop(self, number: int) -> Counts:
        relay = self._relays.pop(number)
        relay.stop()
        return relay.counts


def main() -> None:
    """Answer the calls of the parent until it is gone."""
    connection, relays = Connection(int(sys.argv[1])), _RelayServer()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            method, *arguments = connection.recv()
            try:
                answer = getattr(relays, method)(*arguments)
            except Exception as error:  # noqa: BLE001 - the parent raises it
                answer = error
            connection.send(answer)


if __name__ == "__main__":
    main()
