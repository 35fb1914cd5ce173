"""Reads KV events as a router does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import msgspec
import zmq
from servers import wait_until

from hicache_storage.events.messages import AllBlocksCleared
from hicache_storage.events.publisher import EventPublisher

_LIMIT_MS = 20_000
_END = (1 << 64) - 1


class Subscriber:
    """A SUB socket that returns each batch, decoded with `decode`, and its number."""

    def __init__(
        self,
        endpoint: str,
        *,
        topic: str = "",
        binds: bool = False,
        decode: Callable[[bytes], Any] = msgspec.msgpack.decode,
    ) -> None:
        self._decode = decode
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(topic)
        (self._socket.bind if binds else self._socket.connect)(endpoint)

    def wait_until_connected(self, publisher: EventPublisher) -> int:
        """Publish until a batch arrives, because the first ones get lost, then receive the others.

        Return the number of the next batch.
        """

        def arrived() -> bool:
            publisher.publish([AllBlocksCleared()])
            return bool(self._socket.poll(50))

        wait_until(arrived, 20)
        while self.receive()[0] < publisher._next_number - 1:
            pass
        return publisher._next_number

    def receive(self) -> tuple[int, Any]:
        """Return the number and the content of the next batch."""
        assert self._socket.poll(_LIMIT_MS), "no event came"
        _, number, payload = self._socket.recv_multipart()
        return int.from_bytes(number, "big"), self._decode(payload)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


def past(
    endpoint: str, first: int = 0, *, decode: Callable[[bytes], Any] = msgspec.msgpack.decode
) -> list[tuple[int, Any]]:
    """Return the past batches from number `first` on, with their numbers."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.connect(endpoint)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        found: list[tuple[int, Any]] = []
        while True:
            assert socket.poll(_LIMIT_MS), "the replay did not end"
            _, _, number, payload = socket.recv_multipart()
            if int.from_bytes(number, "big") == _END:
                return found
            found.append((int.from_bytes(number, "big"), decode(payload)))
    finally:
        context.destroy(linger=0)
