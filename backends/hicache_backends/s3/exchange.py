"""Many requests at once over several connections, driven by the thread that waits for them.

What is to be asked and what follows from an answer are generators, which yield requests and pauses and
are sent replies: straight code for one page each. No thread is made, so none is left, and no buffer is
touched after the call.
"""

from __future__ import annotations

import enum
import heapq
import select
import ssl
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from hicache_backends.s3.connection import Connection, Request
from hicache_backends.s3.replies import Malformed, Reply, Truncated
from hicache_storage.errors import HiCacheError, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from hicache_backends.s3.addresses import Address
    from hicache_backends.s3.connections import Connections
    from hicache_storage.backend_support.deadline import Deadline

T = TypeVar("T")

_DIGESTED_NBYTES_PER_S = 8e6
"""How fast even a slow store works off a page before it answers."""
_LOOK_UP_S = 0.2
"""How often a waiting call looks whether the storage was closed, or a connection says nothing."""


class Loss(enum.Enum):
    """How a reply was lost."""

    UNREACHABLE = "unreachable"
    """No connection was made."""
    RESET = "resets"
    """The connection broke."""
    TRUNCATED = "truncated"
    """The connection ended in the middle of the reply."""
    MALFORMED = "malformed"
    """What came is no reply."""
    STALLED = "stalls"
    """Nothing moved on the connection for too long."""
    LATE = "timeouts"
    """The call's time is up."""


class Lost(Exception):
    """No reply came to a request."""

    def __init__(
        self,
        loss: Loss,
        reason: str,
        *,
        was_sent: bool = False,
        is_stale: bool = False,
        error: HiCacheError | None = None,
    ) -> None:
        super().__init__(reason)
        self.loss = loss
        self.error = error
        """What to tell the user in place of `reason`, where it is known better."""
        self.was_sent = was_sent
        """The server may have got all of the request."""
        self.is_stale = is_stale
        """The connection was an old one, which the server may have closed meanwhile."""


class Failed(Exception):
    """A page whose call failed for another reason than its own absence."""

    def __init__(self, error: HiCacheError, *, in_doubt: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.in_doubt = in_doubt
        """A write may have taken effect, or may yet."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Go on after so long."""

    seconds: float


Call: TypeAlias = "Generator[Request | Pause, Reply | None, T]"


class _Flight:
    """A request under way."""

    __slots__ = ("address", "connection", "digest_s", "number")

    def __init__(
        self, number: int, connection: Connection, request: Request, address: Address | None
    ) -> None:
        self.number = number
        self.connection = connection
        self.digest_s = sum(map(len, request.body)) / _DIGESTED_NBYTES_PER_S
        self.address = address
        """Of a connection that is being made."""


class Exchange:
    """One storage call: its deadline, and what is under way. Of one thread, used once."""

    def __init__(
        self, connections: Connections, *, deadline: Deadline, fan_out: int, stall_s: float
    ) -> None:
        self._connections = connections
        self._deadline = deadline
        self._fan_out = fan_out
        self._stall_s = stall_s
        self._calls: Sequence[Call[Any]] = ()
        self._outcomes: list[Any] = []
        self._poller = select.poll()
        self._flights: dict[int, _Flight] = {}
        self._paused: list[tuple[float, int]] = []
        self._now_s = time.monotonic()
        self._deadline_s = self._now_s + deadline.remaining_s()
        self._look_up_s = self._now_s + _LOOK_UP_S

    def run(self, calls: Sequence[Call[T]]) -> list[T | Failed]:
        """What each call comes to.

        Raises:
            StorageClosed: The storage was closed meanwhile.
        """
        self._calls = calls
        self._outcomes = [None] * len(calls)
        fresh = deque(range(len(calls)))
        self._connections.enter()
        try:
            while fresh or self._flights or self._paused:
                while fresh and len(self._flights) + len(self._paused) < self._fan_out:
                    self._start(fresh.popleft())
                if self._flights or self._paused:
                    self._wait()
            return cast("list[T | Failed]", self._outcomes)
        finally:
            for flight in self._flights.values():
                flight.connection.close()
            self._connections.leave()

    def _start(self, number: int) -> None:
        self._now_s = time.monotonic()  # to digest the page before took its time
        if self._now_s < self._deadline_s:
            self._advance(number, next)
        else:
            self._calls[number].close()
            self._outcomes[number] = Failed(StorageTimeout("s3: there was no time for this page"))

    # --- one turn ------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for what comes first, and go on with it."""
        until_s = min(self._deadline_s, self._look_up_s)
        if self._paused:
            until_s = min(until_s, self._paused[0][0])
        wait_ms = max(0, int((until_s - self._now_s) * 1000) + 1)
        ready = self._poller.poll(wait_ms)
        self._now_s = time.monotonic()
        for fd, events in ready:
            self._go_on(self._flights[fd], events)
        while self._paused and self._paused[0][0] <= self._now_s:
            _, number = heapq.heappop(self._paused)
            self._advance(number, lambda call: call.send(None))
        if self._now_s >= self._look_up_s or self._now_s >= self._deadline_s:
            self._look_up()

    def _look_up(self) -> None:
        """End what has taken too long, and everything if the storage was closed."""
        self._connections.ensure_open()
        self._look_up_s = self._now_s + min(_LOOK_UP_S, self._stall_s / 4)
        is_late = self._now_s >= self._deadline_s
        for flight in list(self._flights.values()):
            if is_late:
                self._lose(flight, Loss.LATE, "the server did not answer in time")
            elif self._now_s - flight.connection.moved_s > self._stall_s + flight.digest_s:
                self._lose(flight, Loss.STALLED, "the connection fell silent")
        if is_late:
            paused, self._paused = self._paused, []
            for _, number in paused:
                self._throw(number, Lost(Loss.LATE, "there was no time for another attempt"))

    # --- requests ------------------------------------------------------------------------------------

    def _go_on(self, flight: _Flight, events: int) -> None:
        connection = flight.connection
        connection.moved_s = self._now_s
        wanted = connection.wants
        try:
            reply = connection.go_on(events)
        except Truncated as error:
            self._lose(flight, Loss.TRUNCATED, str(error))
        except Malformed as error:
            self._lose(flight, Loss.MALFORMED, str(error))
        except OSError as error:
            self._lose(flight, Loss.RESET, _reason(error))
        else:
            if reply is None:
                if connection.wants != wanted:
                    self._poller.modify(connection.fd, connection.wants)
            elif reply.status < 300 and not connection.is_sent:
                self._lose(flight, Loss.MALFORMED, "the server has taken what was not sent")
            else:
                self._land(flight)
                self._connections.give_back(connection)
                self._advance(flight.number, lambda call: call.send(reply))

    def _begin(self, number: int, request: Request) -> None:
        address: Address | None = None
        connection = self._connections.idle()
        try:
            if connection is None:
                connection, address = self._connections.connect(self._deadline)
            connection.moved_s = self._now_s
            flight = _Flight(number, connection, request, address)
            self._flights[connection.fd] = flight
            self._poller.register(connection.fd, connection.wants)
            connection.begin(request)
            self._poller.modify(connection.fd, connection.wants)
        except StorageTimeout as error:  # an OSError, as the next one is
            self._throw(number, Lost(Loss.LATE, str(error), error=error))
        except StorageUnavailable as error:
            self._throw(number, Lost(Loss.UNREACHABLE, str(error), error=error))
        except OSError as error:
            reason = _reason(error)
            if connection is None:
                self._throw(number, Lost(Loss.UNREACHABLE, reason))
            else:
                self._lose(self._flights[connection.fd], Loss.RESET, reason)

    def _lose(self, flight: _Flight, loss: Loss, reason: str) -> None:
        connection = flight.connection
        self._land(flight)
        connection.close()
        if flight.address is not None and not connection.is_connected:
            self._connections.failed(flight.address)
            loss = Loss.UNREACHABLE if loss is Loss.RESET else loss
        is_stale = connection.was_used and connection.is_silent and loss is Loss.RESET
        lost = Lost(loss, reason, was_sent=connection.is_sent, is_stale=is_stale)
        self._throw(flight.number, lost)

    def _land(self, flight: _Flight) -> None:
        self._poller.unregister(flight.connection.fd)
        del self._flights[flight.connection.fd]

    # --- calls ---------------------------------------------------------------------------------------

    def _throw(self, number: int, lost: Lost) -> None:
        self._advance(number, lambda call: call.throw(lost))

    def _advance(self, number: int, resume: Callable[[Call[Any]], Request | Pause]) -> None:
        """Let a call go on to its next step, or to its end."""
        try:
            step = resume(self._calls[number])
        except StopIteration as end:
            self._outcomes[number] = end.value
        except Failed as failed:
            self._outcomes[number] = failed
        except HiCacheError as error:
            self._outcomes[number] = Failed(error)
        else:
            if isinstance(step, Request):
                self._begin(number, step)
            else:
                heapq.heappush(self._paused, (self._now_s + step.seconds, number))


def _reason(error: OSError) -> str:
    """The system's words, and its number where that says more."""
    text = error.strerror or str(error) or type(error).__name__
    is_numbered = error.errno is not None and not isinstance(error, ssl.SSLError)
    return f"{text} (errno {error.errno})" if is_numbered else text
