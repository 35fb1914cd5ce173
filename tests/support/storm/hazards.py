"""What happens to a store's server or disk in the middle of a turn, besides the ends of processes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from hicache_conformance.tools.network.proxy import FaultProxy

    from storm.networks import Network

TIMEOUT_S = 2.0
"""The time limit of calls in a storm."""
_ROUNDS = 5
_LENGTH_S = (0.1, 2 * TIMEOUT_S)
"""How long a server does not answer. A call without a limit would visibly last too long."""


class _Server(Protocol):
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Hazard(Protocol):
    """A way to hit a store. When `strike` returns, the store works again."""

    def strike(self, chance: random.Random, work: Callable[[float], None]) -> None:
        """Hit the store. Call `work` to let the processes run for some seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Kill:
    """A hazard that sends the server SIGKILL and starts it again with the same data."""

    server: _Server

    def strike(self, chance: random.Random, work: Callable[[float], None]) -> None:
        self.server.stop()
        self.server.start()


@dataclass(frozen=True, slots=True)
class Pause:
    """A hazard that stops the server (SIGSTOP, later SIGCONT), while the kernel accepts connections."""

    server: _Server

    def strike(self, chance: random.Random, work: Callable[[float], None]) -> None:
        self.server.pause()
        try:
            work(chance.uniform(*_LENGTH_S))
        finally:
            self.server.resume()


@dataclass(frozen=True, slots=True)
class Partition:
    """A hazard in which no byte passes between the clients and the server, or none in one direction.

    Afterwards the held bytes arrive late, or their connections are reset.
    """

    proxy: FaultProxy

    def strike(self, chance: random.Random, work: Callable[[float], None]) -> None:
        self.proxy.go_silent(chance.choice((None, "up", "down")))
        try:
            work(chance.uniform(*_LENGTH_S))
            if chance.random() < 0.5:
                self.proxy.refuse()
        finally:
            self.proxy.pass_through()


@dataclass(frozen=True, slots=True)
class Isolation:
    """A hazard in which no packet reaches or leaves one host. TCP sends packets again, or gives up."""

    network: Network
    host: int

    def strike(self, chance: random.Random, work: Callable[[float], None]) -> None:
        self.network.cut(self.host)
        try:
            work(chance.uniform(*_LENGTH_S))
        finally:
            self.network.heal(self.host)


@dataclass(frozen=True, slots=True)
class FullDisk:
    """A hazard in which a file takes up the rest of the disk for a while.

    A server on that disk is killed before there is space again, unless it has ended by itself. It
    starts again with what it could write.
    """

    directory: Path
    server: _Server | None = None

    def strike(self, chance: random.Random, work: Callable[[float], None]) -> None:
        filler = self.directory / "filler"
        try:
            with filler.open("wb", buffering=0) as file:
                _fill(file.write)
            work(chance.uniform(0.01, 0.1))
            if self.server is not None:
                self.server.stop()
        finally:
            filler.unlink(missing_ok=True)
        if self.server is not None:
            self.server.start()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A hazard in which a server reads, but refuses writes: it is full, or read-only."""

    refuse: Callable[[], None]
    accept: Callable[[], None]

    def strike(self, chance: random.Random, work: Callable[[float], None]) -> None:
        self.refuse()
        try:
            work(chance.uniform(*_LENGTH_S))
        finally:
            self.accept()


@dataclass(frozen=True, slots=True)
class Wipe:
    """A hazard in which the page files of a directory vanish, again and again."""

    pages: Callable[[], Iterable[Path]]

    def strike(self, chance: random.Random, work: Callable[[float], None]) -> None:
        for _ in range(_ROUNDS):
            for path in self.pages():
                path.unlink(missing_ok=True)
            work(chance.uniform(0.001, 0.05))


@dataclass(frozen=True, slots=True)
class Damage:
    """A hazard in which a byte of each page file of a directory is inverted, again and again."""

    pages: Callable[[], Iterable[Path]]

    def strike(self, chance: random.Random, work: Callable[[float], None]) -> None:
        for _ in range(_ROUNDS):
            for path in self.pages():
                with suppress(FileNotFoundError), path.open("r+b") as file:
                    place = chance.randrange(max(1, path.stat().st_size))
                    file.seek(place)
                    found = file.read(1)
                    file.seek(place)
                    file.write(bytes(each ^ 0xFF for each in found))
            work(chance.uniform(0.001, 0.05))


def _fill(write: Callable[[bytes], object]) -> None:
    """Write until there is no space left."""
    block = bytes(4096)
    while True:
        try:
            write(block)
        except OSError:
            return
