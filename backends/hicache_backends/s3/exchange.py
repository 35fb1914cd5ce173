"""Many requests at once on several connections, driven by the calling thread.

A call is a generator for one page: it yields requests and pauses, and receives replies. No thread
is started, so none can be left over, and no buffer is touched after the storage call has ended.
Memory that is revoked while a request uses it ends the call for its page, and the connection.

The compiled data plane carries requests over plain sockets: one call carries all that are ready,
and waits without the interpreter lock. It stops at a request whose reply is not plain. Then Python
takes over all requests in flight, from where the data plane has left them. Over TLS, or without the
compiled module, Python carries every request.
"""

from __future__ import annotations

import heapq
import os
import select
import ssl
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from hicache_backends.s3.connections import Connection, Request
from hicache_backends.s3.data_plane import Progress, carry
from hicache_backends.s3.losses import CallFailed, Loss, ReplyLost
from hicache_backends.s3.replies import Malformed, Reply, Truncated
from hicache_storage import native
from hicache_storage.backend_support.revocable import RevokedError, is_revoked
from hicache_storage.errors import HiCacheError, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from hicache_backends.s3.addresses import Address
    from hicache_backends.s3.connections import IdleConnections
    from hicache_storage.backend_support.deadline import Deadline

T = TypeVar("T")

_PROCESSED_NBYTES_PER_S = 8e6
"""How fast even a slow store processes a page before it answers."""
_PREPARE_S = 0.005
"""The processor time that a call may spend to prepare requests before a connection is free."""
_CHECK_S = 0.2
"""How often to check for a closed storage and for stalled connections."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A step of a call that waits: the call is resumed after this time."""

    seconds: float


Call: TypeAlias = "Generator[Request | Pause, Reply | None, T]"


class _InFlight:
    __slots__ = ("address", "connection", "number", "progress", "request")

    def __init__(
        self, number: int, connection: Connection, request: Request, address: Address | None
    ) -> None:
        self.number = number
        self.connection = connection
        self.request = request
        self.address = address
        """The address of a connection that is still connecting."""
        self.progress: Progress | None = None
        """How far the data plane has come. None: Python carries the request."""

    @property
    def processing_s(self) -> float:
        """How long the store may take to process the body."""
        return sum(map(len, self.request.body)) / _PROCESSED_NBYTES_PER_S


class Exchange:
    """The requests of one storage call, under its deadline. One thread uses it, once."""

    def __init__(
        self, connections: IdleConnections, *, deadline: Deadline, fan_out: int, stall_s: float
    ) -> None:
        self._connections = connections
        self._deadline = deadline
        self._fan_out = fan_out
        self._stall_s = stall_s
        self._calls: Sequence[Call[Any]] = ()
        self._outcomes: list[Any] = []
        self._poller = select.poll()
        self._ready: list[tuple[int, Request]] = []
        """Requests that wait for a connection, as a heap: the earliest call goes first."""
        self._in_flight: dict[int, _InFlight] = {}
        self._python_count = 0
        """How many requests in flight Python carries."""
        self._paused: list[tuple[float, int]] = []
        self._now_s = time.monotonic()
        self._deadline_s = self._now_s + deadline.remaining_s()
        self._next_check_s = self._now_s + _CHECK_S

    def run(self, calls: Sequence[Call[T]]) -> list[T | CallFailed]:
        """Run the calls. Return the result of each.

        Raises:
            StorageClosed: The storage was closed in the meantime.
        """
        self._calls = calls
        self._outcomes = [None] * len(calls)
        fresh = deque(range(len(calls)))
        self._connections.begin_call()
        try:
            while fresh or self._ready or self._in_flight or self._paused:
                self._start_calls(fresh)
                while self._ready and self._unused_count() > 0:
                    self._begin_request(*heapq.heappop(self._ready))
                if self._in_flight or self._paused:
                    self._wait()
            return cast("list[T | CallFailed]", self._outcomes)
        finally:
            for flight in self._in_flight.values():
                flight.connection.close()
            self._connections.end_call()

    def _unused_count(self) -> int:
        """Return how many more requests may be in flight. A paused call counts as a request."""
        return self._fan_out - len(self._in_flight) - len(self._paused)

    def _start_calls(self, fresh: deque[int]) -> None:
        """Start a call for each unused connection, and prepare more for the data plane."""
        may_be_ahead = self._connections.is_compiled and not self._paused and not self._python_count
        ahead_s = time.thread_time() + _PREPARE_S if may_be_ahead else 0.0
        while fresh and (len(self._ready) < self._unused_count() or time.thread_time() < ahead_s):
            self._start_call(fresh.popleft())

    def _start_call(self, number: int) -> None:
        self._now_s = time.monotonic()  # hashing the previous page may have taken long
        if self._now_s < self._deadline_s:
            self._resume_call(number, next)
        else:
            self._calls[number].close()
            self._outcomes[number] = CallFailed(
                StorageTimeout("s3: there was no time left for this page")
            )

    # --- one turn ------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for an event in Python, or for all replies on the data plane, and handle them."""
        until_s = min(self._deadline_s, self._next_check_s)
        if self._paused:
            until_s = min(until_s, self._paused[0][0])
        if self._in_flight and not self._python_count:
            self._carry(until_s)
        else:
            self._poll(until_s)
        while self._paused and self._paused[0][0] <= self._now_s:
            _, number = heapq.heappop(self._paused)
            self._resume_call(number, lambda call: call.send(None))
        if self._now_s >= self._next_check_s or self._now_s >= self._deadline_s:
            self._check_timeouts()

    def _check_timeouts(self) -> None:
        """Fail requests that take too long, or all calls if the storage was closed."""
        self._connections.ensure_open()
        self._next_check_s = self._now_s + min(_CHECK_S, self._stall_s / 4)
        is_late = self._now_s >= self._deadline_s
        for flight in list(self._in_flight.values()):
            if is_late:
                self._fail_request(flight, Loss.LATE, "the server did not answer in time")
            elif (
                self._now_s - flight.connection.last_progress_s
                > self._stall_s + flight.processing_s
            ):
                self._fail_request(flight, Loss.STALLED, "the connection fell silent")
        if is_late:
            waiting = [
                *(number for _, number in self._paused),
                *(number for number, _ in self._ready),
            ]
            self._paused.clear()
            self._ready.clear()
            for number in waiting:
                self._fail_call(
                    number, ReplyLost(Loss.LATE, "there was no time for another attempt")
                )

    # --- on the data plane ---------------------------------------------------------------------------

    def _carry(self, until_s: float) -> None:
        """Carry all requests that are ready, in one call without the interpreter lock."""
        flights = list(self._in_flight.values())
        begun = [flight.progress or Progress() for flight in flights]
        queued = sorted(self._ready)
        requests = [flight.request for flight in flights] + [request for _, request in queued]
        lanes = [flight.connection for flight in flights]
        found = carry([lane.fd for lane in lanes], begun, requests, until_s)
        self._now_s = time.monotonic()
        queued_progress = [one for one in found[len(begun) :] if one.lane >= 0]
        self._ready = queued[len(queued_progress) :]  # requests begin in order
        self._in_flight = {}
        for (number, request), progress in zip(queued, queued_progress, strict=False):
            flights.append(_InFlight(number, lanes[progress.lane], request, None))
        for flight, progress in zip(flights, found, strict=False):
            self._settle(flight, progress)
        for lane in lanes:
            if lane.is_lent and lane.fd not in self._in_flight:
                self._connections.release(lane)

    def _settle(self, flight: _InFlight, progress: Progress) -> None:
        """Handle what the data plane has done for one request."""
        connection = flight.connection
        if progress.is_complete:
            connection.is_connected = connection.was_used = True
            self._resume_call(flight.number, lambda call: call.send(progress.reply()))
            return
        if progress.verdict == native.REVOKED:
            if progress.sent:
                connection.close()
            self._resume_call(flight.number, _revoke)
            return
        if progress.verdict == native.STALE and connection.was_used:
            connection.close()
            heapq.heappush(self._ready, (flight.number, flight.request))
            return
        if flight.progress is None or flight.progress.moved != progress.moved:
            connection.last_progress_s = self._now_s
        flight.progress = progress
        self._in_flight[connection.fd] = flight
        if progress.verdict < 0:
            error = OSError(-progress.verdict, os.strerror(-progress.verdict))
            self._fail_request(flight, Loss.RESET, _reason(error))
        elif progress.verdict:
            self._take_over(flight, progress)

    def _take_over(self, flight: _InFlight, progress: Progress) -> None:
        """Carry a request in Python, from where the data plane has left it."""
        flight.progress = None
        self._python_count += 1
        self._poller.register(flight.connection.fd, flight.connection.events)
        self._step(flight, partial(_resumed, flight, progress))

    # --- in Python -----------------------------------------------------------------------------------

    def _poll(self, until_s: float) -> None:
        """Carry requests until the first event."""
        for flight in list(self._in_flight.values()):
            if flight.progress is not None:
                self._take_over(flight, flight.progress)
        wait_ms = max(0, int((until_s - self._now_s) * 1000) + 1)
        ready = self._poller.poll(wait_ms)
        self._now_s = time.monotonic()
        for fd, events in ready:
            flight = self._in_flight[fd]
            flight.connection.last_progress_s = self._now_s
            self._step(flight, partial(flight.connection.handle_events, events))

    def _step(self, flight: _InFlight, step: Callable[[], Reply | None]) -> None:
        connection = flight.connection
        wanted = connection.events
        try:
            reply = step()
        except RevokedError:
            self._end_request(flight)
            connection.close()
            self._resume_call(flight.number, _revoke)
        except Truncated as error:
            self._fail_request(flight, Loss.TRUNCATED, str(error))
        except Malformed as error:
            self._fail_request(flight, Loss.MALFORMED, str(error))
        except OSError as error:
            self._fail_request(flight, Loss.RESET, _reason(error), cause=error)
        else:
            if reply is None:
                if connection.events != wanted:
                    self._poller.modify(connection.fd, connection.events)
            elif reply.status < 300 and not connection.is_sent:
                self._fail_request(
                    flight, Loss.MALFORMED, "the server replied before the request was sent"
                )
            else:
                self._end_request(flight)
                self._connections.release(connection)
                self._resume_call(flight.number, lambda call: call.send(reply))

    # --- requests ------------------------------------------------------------------------------------

    def _begin_request(self, number: int, request: Request) -> None:
        if is_revoked(request):
            self._resume_call(number, _revoke)
            return
        is_native = self._connections.is_compiled and not self._python_count
        address: Address | None = None
        try:
            connection = self._connections.take_idle(is_checked=not is_native)
            if connection is None:
                connection, address = self._connections.connect(self._deadline)
        except StorageTimeout as error:  # also an OSError, so it must come before that
            self._fail_call(number, ReplyLost(Loss.LATE, str(error), error=error))
            return
        except StorageUnavailable as error:
            self._fail_call(number, ReplyLost(Loss.UNREACHABLE, str(error), error=error))
            return
        except OSError as error:
            self._fail_call(number, ReplyLost(Loss.UNREACHABLE, _reason(error)))
            return
        connection.last_progress_s = self._now_s
        flight = self._in_flight[connection.fd] = _InFlight(number, connection, request, address)
        if is_native:
            connection.lend()
            flight.progress = Progress()
        else:
            self._python_count += 1
            self._poller.register(connection.fd, connection.events)
            self._step(flight, partial(connection.begin, request))

    def _fail_request(
        self, flight: _InFlight, loss: Loss, reason: str, *, cause: OSError | None = None
    ) -> None:
        connection = flight.connection
        if flight.progress is not None:
            with suppress(RevokedError):
                _resumed(flight, flight.progress)  # updates what is read below
        self._end_request(flight)
        connection.close()
        if flight.address is not None and not connection.is_connected:
            self._connections.report_failure(flight.address)
            loss = Loss.UNREACHABLE if loss is Loss.RESET else loss
        is_stale = connection.was_used and connection.is_silent and loss is Loss.RESET
        lost = ReplyLost(loss, reason, was_sent=connection.is_sent, is_stale=is_stale)
        lost.__cause__ = cause
        self._fail_call(flight.number, lost)

    def _end_request(self, flight: _InFlight) -> None:
        if flight.progress is None:
            self._poller.unregister(flight.connection.fd)
            self._python_count -= 1
        del self._in_flight[flight.connection.fd]

    # --- calls ---------------------------------------------------------------------------------------

    def _fail_call(self, number: int, lost: ReplyLost) -> None:
        self._resume_call(number, lambda call: call.throw(lost))

    def _resume_call(self, number: int, resume: Callable[[Call[Any]], Request | Pause]) -> None:
        """Resume a call, and store the step that it yields."""
        try:
            step = resume(self._calls[number])
        except StopIteration as end:
            self._outcomes[number] = end.value
        except RevokedError:  # a miss, or not stored
            self._outcomes[number] = False
        except CallFailed as failed:
            self._outcomes[number] = failed
        except HiCacheError as error:
            self._outcomes[number] = CallFailed(error)
        else:
            if isinstance(step, Request):
                heapq.heappush(self._ready, (number, step))
            else:
                heapq.heappush(self._paused, (self._now_s + step.seconds, number))


def _revoke(call: Call[Any]) -> Request | Pause:
    return call.throw(RevokedError)


def _resumed(flight: _InFlight, progress: Progress) -> Reply | None:
    return flight.connection.resume(
        flight.request,
        sent=progress.sent,
        received=progress.received,
        head_nbytes=progress.head_nbytes,
        filled=progress.filled,
    )


def _reason(error: OSError) -> str:
    """Return the system's text, plus the error number if it adds something."""
    text = error.strerror or str(error) or type(error).__name__
    is_numbered = error.errno is not None and not isinstance(error, ssl.SSLError)
    return f"{text} (errno {error.errno})" if is_numbered else text
