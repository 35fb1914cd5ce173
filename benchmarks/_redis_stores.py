"""The stores that the `redis` backend is compared with: a bare loop, redis-py and LMCache's client."""

from __future__ import annotations

import importlib.util
import os
import select
import socket
from typing import Any

import redis
from _store import Memory, Store


class RawSocket(Store):
    """The simplest client: a loop over one blocking socket, which trusts every reply."""

    name = "raw socket"
    _set_depth = 4
    _get_depth = 2

    def __init__(self, port: int, source: Memory, destination: Memory) -> None:
        super().__init__(source, destination)
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set(self) -> None:
        head = b"*3\r\n$3\r\nSET\r\n$64\r\n%b\r\n$%d\r\n"
        waiting = 0
        for page_hash, view in zip(self.hashes, self.source.views, strict=True):
            self._send(head % (page_hash.encode(), len(view)), view, b"\r\n")
            waiting += 1
            if waiting == self._set_depth:
                self._expect(b"+OK\r\n")
                waiting -= 1
        for _ in range(waiting):
            self._expect(b"+OK\r\n")

    def get(self) -> None:
        requests = [b"*2\r\n$3\r\nGET\r\n$64\r\n%b\r\n" % one.encode() for one in self.hashes]
        for request in requests[: self._get_depth]:
            self._socket.sendall(request)
        header = bytearray(b"$%d\r\n" % self.destination.page_nbytes)
        end = bytearray(2)
        for number, view in enumerate(self.destination.views):
            pieces = [memoryview(header), view, memoryview(end)]
            while pieces:
                pieces = _beyond(pieces, self._socket.recvmsg_into(pieces)[0])
            if number + self._get_depth < len(requests):
                self._socket.sendall(requests[number + self._get_depth])

    def close(self) -> None:
        self._socket.close()

    def _send(self, *given: bytes | memoryview) -> None:
        pieces = [memoryview(piece) for piece in given]
        while pieces:
            pieces = _beyond(pieces, self._socket.sendmsg(pieces))

    def _expect(self, reply: bytes) -> None:
        if self._socket.recv(len(reply), socket.MSG_WAITALL) != reply:
            raise RuntimeError("the server refused a page")


class RedisPy(Store):
    """redis-py with hiredis and pipelines of a few pages, its fastest configuration."""

    pages_at_once = 8
    name = "redis-py, pipelines of 8"

    def __init__(self, port: int, source: Memory, destination: Memory) -> None:
        super().__init__(source, destination)
        self._client: Any = redis.Redis(port=port)

    def set(self) -> None:
        pairs = list(zip(self.hashes, self.source.views, strict=True))
        for start in range(0, len(pairs), self.pages_at_once):
            with self._client.pipeline(transaction=False) as pipeline:
                for page_hash, view in pairs[start : start + self.pages_at_once]:
                    pipeline.set(page_hash, view)
                pipeline.execute()

    def get(self) -> None:
        views = iter(self.destination.views)
        for start in range(0, len(self.hashes), self.pages_at_once):
            with self._client.pipeline(transaction=False) as pipeline:
                for page_hash in self.hashes[start : start + self.pages_at_once]:
                    pipeline.get(page_hash)
                for data in pipeline.execute():
                    next(views)[:] = data

    def close(self) -> None:
        self._client.close()


class LmcacheClient(Store):
    """LMCache's C++ client for Redis, with as many threads and connections as ours."""

    name = "LMCache's C++ client"
    workers = 4

    def __init__(self, port: int, source: Memory, destination: Memory) -> None:
        super().__init__(source, destination)
        library: Any = _lmcache()
        self._client = library.LMCacheRedisClient("127.0.0.1", port, self.workers, "", "")
        self._done = select.poll()
        self._event_fd = int(self._client.event_fd())
        self._done.register(self._event_fd, select.POLLIN)

    @staticmethod
    def is_installed() -> bool:
        return importlib.util.find_spec("lmcache") is not None

    def set(self) -> None:
        self._finish(self._client.submit_batch_set(self.hashes, self.source.views))

    def get(self) -> None:
        self._finish(self._client.submit_batch_get(self.hashes, self.destination.views))

    def close(self) -> None:
        self._client.close()

    def _finish(self, number: object) -> None:
        while True:
            self._done.poll()
            for done, ok, error, _ in self._client.drain_completions():
                if not ok:
                    raise RuntimeError(f"LMCache: {error}")
                if done == number:
                    return


def _lmcache() -> Any:
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    importlib.import_module("torch")  # LMCache's library is linked against torch's
    return importlib.import_module("lmcache.lmcache_redis")


def _beyond(pieces: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return what is left of `pieces` after the first `nbytes`."""
    while pieces and nbytes >= len(pieces[0]):
        nbytes -= len(pieces[0])
        pieces = pieces[1:]
    return [pieces[0][nbytes:], *pieces[1:]] if pieces and nbytes else pieces
