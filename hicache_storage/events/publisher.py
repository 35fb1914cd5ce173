"""Publish KV events over ZeroMQ, in the protocol of SGLang's and vLLM's own publishers.

A message has three parts: the topic, a sequence number of 8 bytes, and the batch. To get past batches, a
REQ or DEALER socket sends a number to the replay address. The socket receives the batches from that
number on, then a message with the number -1.

Source: vllm/distributed/kv_events.py, `ZmqEventPublisher`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import ConfigError
from hicache_storage.events.messages import EventBatch

if TYPE_CHECKING:
    from hicache_storage.events.messages import AllBlocksCleared, BlockRemoved, BlockStored
    from hicache_storage.events.settings import EventSettings

logger: logging.Logger = logging.getLogger(__name__)

SENT = "event_batches_sent"
DROPPED = "event_batches_dropped"
_END = (-1).to_bytes(8, "big", signed=True)
# How often the publisher's thread looks for requests for past batches.
_POLL_S = 0.1
# A subscriber that is gone delays the end of the process at most this long.
_LINGER_MS = 1000
_WILDCARDS = ("*", "::", "0.0.0.0")  # noqa: S104 - the operator chooses the address


class EventPublisher:
    """A publisher that sends events from a thread of its own. `publish` never blocks. Thread-safe."""

    def __init__(self, settings: EventSettings, *, data_parallel_rank: int | None = None) -> None:
        """Open the sockets. The rank is added to the ports, and is a field of each batch.

        Raises:
            ConfigError: An address is malformed or in use.
        """
        self.users: int = 0
        """The number of users that `acquire_publisher` has counted."""
        self._rank = data_parallel_rank
        self._topic = settings.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._counters = Counters()
        self._lock = threading.Lock()
        self._next_number = 0
        self._queue: queue.Queue[tuple[int, EventBatch]] = queue.Queue(settings.max_queue_size)
        self._past: deque[tuple[int, bytes]] = deque(maxlen=settings.buffer_steps)
        self._closing = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._pub = self._open_pub(settings)
            self._replay = self._open_replay(settings)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="hicache-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> bool:
        """Queue a batch. Return False if it is dropped, which leaves a gap in the sequence numbers."""
        batch = EventBatch(time.time(), events, self._rank)
        with self._lock:
            number = self._next_number
            self._next_number += 1
            try:
                self._queue.put_nowait((number, batch))
            except queue.Full:
                self._counters.add(DROPPED)
                return False
        return True

    def stats(self) -> dict[str, int]:
        """Return how many batches were sent and dropped so far."""
        counts = self._counters.snapshot()
        return {SENT: counts.get(SENT, 0), DROPPED: counts.get(DROPPED, 0)}

    def close(self, timeout_s: float = 1.0) -> None:
        """Send the waiting batches, and close the sockets. Idempotent."""
        deadline = Deadline(timeout_s)
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():  # the thread still uses the sockets, and closes them later
            return
        self._context.destroy(linger=max(1, round(1000 * deadline.remaining_s())))

    # --- sockets -------------------------------------------------------------------------------------

    def _open_pub(self, settings: EventSettings) -> zmq.Socket[bytes]:
        pub = self._context.socket(zmq.PUB)
        pub.set_hwm(settings.hwm)
        pub.linger = _LINGER_MS
        endpoint = offset_port(settings.endpoint, self._rank or 0)
        binds = is_bound(endpoint) if settings.bind is None else settings.bind
        _open("endpoint", pub.bind if binds else pub.connect, endpoint)
        return pub

    def _open_replay(self, settings: EventSettings) -> zmq.Socket[bytes] | None:
        if not settings.replay_endpoint:
            return None
        replay = self._context.socket(zmq.ROUTER)
        replay.linger = _LINGER_MS
        replay.setsockopt(zmq.SNDHWM, 2 * (settings.buffer_steps + 1))  # a whole replay fits
        endpoint = offset_port(settings.replay_endpoint, self._rank or 0)
        _open("replay_endpoint", replay.bind, endpoint)
        return replay

    # --- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not (self._closing.is_set() and self._queue.empty()):
            for step in (self._answer_replays, self._send_next):
                try:
                    step()
                except Exception:
                    logger.exception("KV events could not be sent")
                    self._closing.wait(_POLL_S)

    def _send_next(self) -> None:
        try:
            number, batch = self._queue.get(timeout=_POLL_S)
        except queue.Empty:
            return
        payload = self._encoder.encode(batch)
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        self._past.append((number, payload))
        self._counters.add(SENT)

    def _answer_replays(self) -> None:
        replay = self._replay
        while replay is not None and replay.poll(0):
            client, *rest = replay.recv_multipart()
            if len(rest) != 2 or len(rest[1]) != 8:
                logger.warning("a request for past events is malformed")
                continue
            for _ in range(self._queue.qsize()):  # these batches were published before the request
                self._send_next()
            first = int.from_bytes(rest[1], "big")
            for number, payload in self._past:
                if number >= first:
                    replay.send_multipart(
                        (client, b"", self._topic, number.to_bytes(8, "big"), payload)
                    )
            replay.send_multipart((client, b"", b"", _END, b""))


def is_bound(endpoint: str) -> bool:
    """Return whether a PUB socket binds an address instead of connecting to it, by SGLang's rule."""
    if endpoint.startswith(("ipc://", "inproc://")):
        return True
    return any(wildcard in endpoint for wildcard in _WILDCARDS)


def offset_port(endpoint: str, rank: int) -> str:
    """Return the address for a data-parallel rank, whose port is the first port plus the rank."""
    if not rank or not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}" if port.isdecimal() else endpoint


def _open(field: str, open_socket: Any, endpoint: str) -> None:
    try:
        open_socket(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"events: {field}: {endpoint} cannot be used: {error}") from error


# --- publishers of the process --------------------------------------------------------------------


_lock = threading.Lock()
_publishers: dict[tuple[EventSettings, int | None], EventPublisher] = {}


def acquire_publisher(settings: EventSettings, rank: int | None) -> EventPublisher:
    """Return the process's publisher for these settings, and count one more user.

    An engine may open a new store before it closes the former one with the same address.

    Raises:
        ConfigError: An address is malformed or in use.
    """
    key = (settings, rank)
    with _lock:
        if key not in _publishers:
            _publishers[key] = EventPublisher(settings, data_parallel_rank=rank)
        _publishers[key].users += 1
        return _publishers[key]


def release_publisher(settings: EventSettings, rank: int | None) -> None:
    """Close the publisher if this was its last user."""
    key = (settings, rank)
    with _lock:
        _publishers[key].users -= 1
        if not _publishers[key].users:
            _publishers.pop(key).close()
