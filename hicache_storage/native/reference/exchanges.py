"""HTTP exchanges over several connections in Python: the compiled function, with the same verdicts."""

from __future__ import annotations

import re
import select
import socket
import time
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hicache_storage.native.reference.pieces import IOV_MAX, pieces_after
from hicache_storage.native.reference.sockets import borrowed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from hicache_storage.native.reference.pieces import Pieces

VERDICT, LANE, SENT, RECEIVED, HEAD_NBYTES, FILLED = range(6)
"""The numbers that describe how far an exchange has come."""
STATE_COUNT = 6
STOPPED, STALE = 1, 2
"""Verdicts on an exchange beside the status of its reply, 0 (unfinished) and a negated errno."""

_TURN_NBYTES = 1 << 20
_HEAD = re.compile(
    rb"HTTP/1\.1 (?P<status>[2-5][0-9]{2})(?: [^\x00-\x08\x0a-\x1f]*)?"
    rb"(?P<headers>(?:\r\n[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00-\x08\x0a-\x1f]*)*)"
)
_FRAMING = re.compile(rb"(?i)\r\n(transfer-encoding|connection|content-length):[ \t]*([^\r]*)")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_END_OF_HEAD = b"\r\n\r\n"


def run_exchanges(
    fds: Sequence[int],
    requests: Sequence[Pieces],
    pages: Sequence[Pieces],
    slots: Buffer,
    states: Buffer,
    deadline_s: float,
) -> int:
    """Send requests and receive their replies, one at a time on each connection.

    A connection that has carried an exchange carries the next one that has not begun, unless the reply
    was a 429 or its status is 500 or higher. A reply that is not plain stops its exchange before a byte
    behind the head is judged: the caller goes on from the state. Plain is a final reply of HTTP/1.1
    without `connection` but `keep-alive`, that has no body, or a body with one `content-length` and
    without `transfer-encoding` that fits into the page (a 200) or into the slot.

    Args:
        fds: Connected sockets, or sockets that are connecting.
        requests: The pieces of each request, with its body.
        pages: The memory for the body of each reply with status 200. Empty: the body goes to the slot.
        slots: Memory for the head of each reply and for a small body, of one size each.
        states: Six 64-bit integers an exchange, which the call updates: the verdict, the index of
            the connection (-1: not begun), the bytes sent, the bytes received in the slot, the bytes of
            the head (0: not whole) and the bytes of the page.
        deadline_s: The time of `time.monotonic` when the call ends.

    Returns:
        0, or a negated errno. The verdict on an exchange is the status of its reply; 0 where it is
        unfinished; STOPPED; STALE where its connection was not idle; or a negated errno.
    """
    numbers = memoryview(states).cast("B").cast("q")
    memory = memoryview(slots).cast("B")
    count = len(requests)
    fits = len(pages) == count and len(numbers) == STATE_COUNT * count
    if not fits or (count and (len(memory) % count or not len(memory))):
        raise ValueError("requests, pages, slots and states do not fit together")
    slot_nbytes = len(memory) // count if count else 0
    exchanges = [
        _Exchange(
            request,
            page,
            memory[index * slot_nbytes : (index + 1) * slot_nbytes],
            numbers[index * STATE_COUNT : (index + 1) * STATE_COUNT],
        )
        for index, (request, page) in enumerate(zip(requests, pages, strict=True))
    ]
    carried = [one.state[LANE] for one in exchanges if one.state[LANE] >= 0]
    if len(set(carried)) < len(carried) or any(lane >= len(fds) for lane in carried):
        raise ValueError("requests, pages, slots and states do not fit together")
    with ExitStack() as stack:
        lanes = [_Lane(stack.enter_context(borrowed(fd)), number) for number, fd in enumerate(fds)]
        try:
            _run(exchanges, lanes, deadline_s)
        except OSError as error:
            return -(error.errno or 0)
    return 0


class _Exchange:
    """One exchange. `state` is the caller's memory."""

    def __init__(
        self, request: Pieces, page: Pieces, slot: memoryview, state: memoryview[int]
    ) -> None:
        whole = [memoryview(piece).cast("B") for piece in request]
        into = [memoryview(piece).cast("B") for piece in page]
        self.state: Any = state
        self.slot = slot
        self.out_nbytes = sum(map(len, whole))
        self.in_nbytes = sum(map(len, into))
        _, lane, sent, received, head_nbytes, filled = state
        fits = (
            0 <= sent <= self.out_nbytes
            and 0 <= filled <= self.in_nbytes
            and 0 <= received <= len(slot)
            and 0 <= head_nbytes <= received
            and not 0 < head_nbytes < len(_END_OF_HEAD)
            and (lane >= 0 or not (sent or received or filled))
        )
        if not fits or not self.out_nbytes:
            raise ValueError("requests, pages, slots and states do not fit together")
        self.has_reply_body = bytes(whole[0][:5]) != b"HEAD "
        self.unsent = pieces_after(whole, sent)
        self.unfilled = pieces_after(into, filled)

    def end(self, verdict: int) -> bool:
        self.state[VERDICT] = verdict
        return True

    def send(self, connection: socket.socket) -> bool:
        """Send what the socket takes; return True where the exchange has ended."""
        limit = self.state[SENT] + _TURN_NBYTES
        while self.unsent and self.state[SENT] < limit:
            try:
                sent = connection.sendmsg(
                    self.unsent[:IOV_MAX], (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                )
            except BlockingIOError:
                return False
            except OSError:
                return self.end(STOPPED)
            self.state[SENT] += sent
            self.unsent = pieces_after(self.unsent, sent)
        return False

    def receive(self, connection: socket.socket) -> bool:
        """Receive what is there; return True where the exchange has ended."""
        limit = self.state[FILLED] + _TURN_NBYTES
        while self.state[FILLED] < limit:
            in_page = self.state[HEAD_NBYTES] and self._is_page() and self.unfilled
            into = self.unfilled[:IOV_MAX] if in_page else [self.slot[self.state[RECEIVED] :]]
            if not into[0]:
                return self.end(STOPPED)
            try:
                step = connection.recvmsg_into(into, 0, socket.MSG_DONTWAIT)[0]
            except BlockingIOError:
                return False
            except OSError as error:
                return self.end(-(error.errno or 0))
            if not step:
                return self.end(STOPPED)
            self.state[FILLED if in_page else RECEIVED] += step
            if in_page:
                self.unfilled = pieces_after(self.unfilled, step)
            if not (in_page and self.unfilled) and self._judge():
                return True
        return False

    def _is_page(self) -> bool:
        """Return True where the reply, whose head is whole, has a page as its body."""
        return bool(self.in_nbytes) and self.has_reply_body and bytes(self.slot[9:12]) == b"200"

    def _judge(self) -> bool:
        received = self.state[RECEIVED]
        text = bytes(self.slot[:received])
        end = text.find(_END_OF_HEAD)
        if end < 0:
            return received == len(self.slot) and self.end(STOPPED)
        framing = _plain_framing(text[:end])
        if framing is None:
            return self.end(STOPPED)
        status, length = framing
        first = end + len(_END_OF_HEAD)
        body_nbytes = received - first
        if not self.has_reply_body or status in (204, 304):
            fits, is_whole = not body_nbytes, True
        elif length is None or body_nbytes > length:
            fits = is_whole = False
        elif status == 200 and self.in_nbytes:
            fits = length == self.in_nbytes
            if fits and not self.state[HEAD_NBYTES]:
                self._fill(text[first:])
            is_whole = self.state[FILLED] == self.in_nbytes
        else:
            fits, is_whole = length <= len(self.slot) - first, body_nbytes == length
        if not fits:
            return self.end(STOPPED)
        self.state[HEAD_NBYTES] = first
        return is_whole and self.end(status)

    def _fill(self, data: bytes) -> None:
        """Copy the bytes behind the head into the page."""
        self.state[FILLED] = len(data)
        rest = memoryview(data)
        while rest:
            view = self.unfilled[0]
            step = min(len(view), len(rest))
            view[:step] = rest[:step]
            rest = rest[step:]
            self.unfilled = pieces_after(self.unfilled, step)
        self.unfilled = pieces_after(self.unfilled, 0)


class _Lane:
    """One connection, and the exchange that it carries."""

    def __init__(self, connection: socket.socket, number: int) -> None:
        self.connection = connection
        self.number = number
        self.current: _Exchange | None = None

    @property
    def events(self) -> int:
        is_sending = self.current is not None and self.current.unsent
        return select.POLLIN | select.POLLOUT if is_sending else select.POLLIN

    def is_idle(self) -> bool:
        """Return True where nothing has come since the last reply."""
        polled = select.poll()
        polled.register(self.connection, select.POLLIN)
        return not polled.poll(0)

    def turn(self, events: int, left: deque[_Exchange]) -> None:
        """Move on, and on to the next exchange after a reply that shows no overload."""
        while (current := self.current) is not None:
            if current.unsent:
                has_more = events & ~select.POLLOUT
                ended = current.end(STOPPED) if has_more else current.send(self.connection)
            else:
                ended = current.receive(self.connection)
            if not ended:
                return
            status = current.state[VERDICT]
            self.current = None
            if 200 <= status < 500 and status != 429 and left and self.is_idle():
                self.current = left.popleft()
                self.current.state[LANE] = self.number
            events = select.POLLOUT


def _run(exchanges: Sequence[_Exchange], lanes: Sequence[_Lane], deadline_s: float) -> None:
    left = deque(one for one in exchanges if one.state[LANE] < 0 and not one.state[VERDICT])
    for one in exchanges:
        if one.state[LANE] < 0 or one.state[VERDICT]:
            continue
        lane = lanes[int(one.state[LANE])]
        if not one.state[SENT] and not lane.is_idle():
            one.end(STALE)
        else:
            lane.current = one
    for lane in lanes:
        if lane.current is not None and not lane.current.state[SENT]:
            lane.turn(select.POLLOUT, left)
    while active := {lane.connection.fileno(): lane for lane in lanes if lane.current is not None}:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return
        polled = select.poll()
        for lane in active.values():
            polled.register(lane.connection, lane.events)
        for fd, events in polled.poll(left_s * 1000 + 1):
            active[fd].turn(events, left)


def _plain_framing(head: bytes) -> tuple[int, int | None] | None:
    """Return the status of a plain reply, and the length of its body where it has a plain one."""
    found = _HEAD.fullmatch(head)
    if found is None:
        return None
    length: int | None = None
    is_encoded = False
    for name, text in _FRAMING.findall(found["headers"]):
        value = text.rstrip(b" \t")
        if name.lower() == b"connection" and value.lower() == b"keep-alive":
            continue
        if name.lower() == b"transfer-encoding" and not is_encoded:
            is_encoded = True
            continue
        if name.lower() != b"content-length" or length is not None or not _LENGTH.fullmatch(value):
            return None
        length = int(value)
    return int(found["status"]), None if is_encoded else length
