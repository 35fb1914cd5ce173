"""A server with scripted answers, for answers that no real S3 server gives on demand."""

from __future__ import annotations

import itertools
import re
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_HEAD = re.compile(rb"(?P<method>[A-Z]+) (?P<target>\S+) HTTP/1\.1\r\n")
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")


@dataclass(frozen=True, slots=True)
class Answer:
    """The bytes to send, and what happens to the connection afterwards."""

    data: bytes = b""
    then: str = "keep"
    """What happens to the connection after `data`.

    keep, end, reset; early: answer before the request's body has come, and end; hold: send nothing
    more; drip: send one byte at a time, forever; slow: answer after a while; later: send `rest`
    once `release_rest` is set.
    """


def reply(
    status: int, body: bytes = b"", then: str = "keep", headers: Mapping[str, str] | None = None
) -> Answer:
    """Return an answer with a length."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = f"HTTP/1.1 {status} Whatever\r\ncontent-length: {len(body)}\r\n{lines}\r\n"
    return Answer(head.encode() + body, then)


def error(status: int, code: str, then: str = "keep") -> Answer:
    """Return an error in S3's form."""
    return reply(status, f"<Error><Code>{code}</Code></Error>".encode(), then)


def size(nbytes: int) -> Answer:
    """Return the answer to a HEAD of an object with this size."""
    return Answer(f"HTTP/1.1 200 OK\r\ncontent-length: {nbytes}\r\n\r\n".encode())


def listing(*names: str, nbytes: int, following: str | None = None) -> Answer:
    """Return a page of a listing. `following` is the position of the next page."""
    found = "".join(
        f"<Contents><Key>{name}</Key><Size>{nbytes}</Size></Contents>" for name in names
    )
    token = f"<NextContinuationToken>{following}</NextContinuationToken>" if following else ""
    is_cut = "true" if following else "false"
    text = f"<ListBucketResult>{found}<IsTruncated>{is_cut}</IsTruncated>{token}</ListBucketResult>"
    return reply(200, text.encode())


def deletion(*names: str, kept: tuple[str, ...] = ()) -> Answer:
    """Return the answer to a batch delete of `names`, of which `kept` were not deleted."""
    gone = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
    errors = "".join(f"<Error><Key>{name}</Key><Code>AccessDenied</Code></Error>" for name in kept)
    return reply(200, f"<DeleteResult>{gone}{errors}</DeleteResult>".encode())


RESET = Answer(then="reset")
END = Answer(then="end")
SILENCE = Answer(then="hold")
SLOW_S = 1.8
_DRIP_S = 0.02


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request that the server received."""

    method: str
    target: str
    head: bytes
    body: bytes


class ScriptedS3:
    """A server that answers requests for objects from a script, and those for the bucket by `of_bucket`.

    Requests beyond the script get a 404. `bucket_script` takes precedence over `of_bucket`.
    `certificates` is the directory of `servers.make_certificates`. None: no TLS.
    """

    def __init__(self, certificates: Path | None = None) -> None:
        self._certificates = certificates
        self.requests: list[ReceivedRequest] = []
        self.script: deque[Answer] = deque()
        self.bucket_script: deque[Answer] = deque()
        self.of_bucket = reply(200)
        self.rest = b""
        self.rest_count = 0
        """How often the server tried to send `rest`."""
        self.release_rest = threading.Event()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def methods(self) -> list[str]:
        """The methods of all requests for objects, in order."""
        return [requests.method for requests in self.requests]

    def config(self, **fields: Any) -> dict[str, Any]:
        """Return the config of a store on this server."""
        tls = {"ca_file": str(self._certificates / "ca.crt")} if self._certificates else {}
        return {
            "bucket": "pages",
            "endpoint_url": f"http{'s' if tls else ''}://127.0.0.1:{self.port}",
            **tls,
            "access_key_id": "AKIDEXAMPLE",
            "secret_access_key": "sesame/sesame/sesame",
            "fan_out": 1,
            "timeout_s": 5.0,
            **fields,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.release_rest.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            connection.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(10)
            self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        data = b""
        try:
            if self._certificates is not None:
                context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                files = (self._certificates / "server.crt", self._certificates / "server.key")
                context.load_cert_chain(*files)
                connection = context.wrap_socket(connection, server_side=True)
                self._open.append(connection)
            while True:
                while (end := data.find(b"\r\n\r\n") + 4) < 4:
                    more = connection.recv(65536)
                    if not more:
                        return
                    data += more
                head, data = data[:end], data[end:]
                answer = self._next(head)
                length = int(found[1]) if (found := _LENGTH.search(head)) else 0
                while len(data) < length and answer.then != "early":
                    data += connection.recv(1 << 20)
                self._note(head, data[:length])
                data = data[length:]
                if not self._send(connection, answer):
                    return
        except OSError:
            return
        finally:
            connection.close()

    def _next(self, head: bytes) -> Answer:
        with self._lock:
            if _is_of_bucket(head):
                return self.bucket_script.popleft() if self.bucket_script else self.of_bucket
            return self.script.popleft() if self.script else error(404, "NoSuchKey")

    def _note(self, head: bytes, body: bytes) -> None:
        match = _HEAD.match(head)
        assert match is not None
        if not _is_of_bucket(head):
            requests = ReceivedRequest(
                match["method"].decode(), match["target"].decode(), head, body
            )
            with self._lock:
                self.requests.append(requests)

    def _send(self, connection: socket.socket, answer: Answer) -> bool:
        """Send an answer. Return True if the connection stays open."""
        if answer.then == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if answer.then == "drip":
            self._drip(connection, answer.data)
            return False
        if answer.then == "slow":
            self._ended.wait(SLOW_S)
        head, end, body = answer.data.partition(b"\r\n\r\n")
        for part in (head + end, body):  # over TLS each is a record
            connection.sendall(part)
        if answer.then == "later":
            self.release_rest.wait()
            with suppress(OSError):
                connection.sendall(self.rest)
            self.rest_count += 1
            return False
        if answer.then == "hold":
            self._ended.wait()
            return False
        if answer.then == "early":
            connection.shutdown(socket.SHUT_WR)
            self._ended.wait(1)  # the server reads nothing more; the client has its answer
        return answer.then in ("keep", "slow")

    def _drip(self, connection: socket.socket, data: bytes) -> None:
        """Send `data` byte by byte, then its last byte again and again."""
        for number in itertools.count():
            if self._ended.wait(_DRIP_S):
                return
            connection.sendall(data[number : number + 1] or data[-1:])


def _is_of_bucket(head: bytes) -> bool:
    match = _HEAD.match(head)
    return match is not None and match["target"].partition(b"?")[0] == b"/pages"
