"""Run an S3 server that only moves bytes, to show the limit for any client.

python benchmarks/_null_server.py [CERTIFICATE KEY]

It prints its port (with a certificate also the TLS port), and serves until its standard input ends.

It serves HEAD, GET, PUT and DELETE of an object, listings (ListObjectsV2) and batch deletes, and ignores
signatures. It reuses the memory of deleted objects, because fresh memory would take most of the time. A
request may also be `SINK n` or `SOURCE n`: n bytes in one direction without HTTP, for the limit of the
sockets.
"""

from __future__ import annotations

import re
import socket
import ssl
import sys
import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict
from itertools import islice, takewhile
from urllib.parse import parse_qs

_HEAD_LIMIT = 32 << 10
_REQUEST = re.compile(rb"(?P<method>[A-Z]+) (?P<name>[^ ?]+)(\?(?P<query>[^ ]*))?")
_KEY = re.compile(rb"<Key>([^<]*)</Key>")
_LISTED_AT_ONCE = 1000
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_EXPECTS = re.compile(rb"(?i)\r\nexpect: *100-continue")
_PLAIN = re.compile(rb"(SINK|SOURCE) (\d+)")

objects: dict[bytes, bytearray] = {}
spare: defaultdict[int, list[bytearray]] = defaultdict(list)
block = bytearray(4 << 20)
names: list[bytes] = []
"""The names of `objects` in order, plus names of deleted ones. Empty: must be sorted again."""


def serve(connection: socket.socket) -> None:
    """Answer the requests of one connection until it ends."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    scratch = bytearray(_HEAD_LIMIT)
    view = memoryview(scratch)
    used = 0
    with connection:
        while True:
            while (end := scratch.find(b"\r\n\r\n", 0, used)) < 0:
                taken = connection.recv_into(view[used:])
                if not taken:
                    return
                used += taken
            head = bytes(view[:end])
            if plain := _PLAIN.match(head):
                move(connection, plain[1] == b"SINK", int(plain[2]) - (used - end - 4))
                used = 0
                continue
            length = int(found[1]) if (found := _LENGTH.search(head)) else 0
            rest = bytes(view[end + 4 : used])
            body, rest = rest[:length], rest[length:]
            answer(connection, head, length, body)
            view[: len(rest)] = rest
            used = len(rest)


def answer(connection: socket.socket, head: bytes, length: int, body: bytes) -> None:
    """Answer one request. `body` is the part of its body that came with the head."""
    request = _REQUEST.match(head)
    assert request is not None
    method, name = request["method"], request["name"]
    if method == b"POST" or b"list-type=2" in (request["query"] or b""):
        while len(body) < length:
            body += connection.recv(length - len(body))
        query = parse_qs(request["query"].decode())
        send_xml(connection, deletion(name, body) if body else listing(name, query))
        return
    if method == b"PUT":
        stored = objects.get(name)
        if stored is None or len(stored) != length:
            stored = spare[length].pop() if spare[length] else bytearray(length)
        if _EXPECTS.search(head):
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        target = memoryview(stored)
        target[: len(body)] = body
        at = len(body)
        while at < length:
            at += connection.recv_into(target[at:])
        if name not in objects:
            names.clear()
        objects[name] = stored
        connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "0"\r\nContent-Length: 0\r\n\r\n')
    elif method == b"DELETE":
        remove(name)
        connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
    else:
        stored = objects.get(name)
        if stored is None and name.count(b"/") > 1:
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        stored = stored or bytearray()
        reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(stored)
        send(connection, [reply] if method == b"HEAD" else [reply, stored])


def remove(name: bytes) -> None:
    """Delete an object, if it exists."""
    gone = objects.pop(name, None)
    if gone is not None:
        spare[len(gone)].append(gone)


def deletion(bucket: bytes, body: bytes) -> bytes:
    """Delete the objects that a batch delete names. Return its answer."""
    keys = _KEY.findall(body)
    for key in keys:
        remove(bucket + b"/" + key)
    gone = b"".join(b"<Deleted><Key>%s</Key></Deleted>" % key for key in keys)
    return b"<DeleteResult>%s</DeleteResult>" % gone


def listing(bucket: bytes, query: dict[str, list[str]]) -> bytes:
    """Return the next page of a listing. The last name of a page is the token of the next page."""
    if not names:
        names.extend(sorted(objects))
    head = bucket + b"/"
    prefix = head + query.get("prefix", [""])[0].encode()
    token = query.get("continuation-token", [""])[0].encode()
    start = bisect_right(names, head + token) if token else bisect_left(names, prefix)
    below = takewhile(lambda name: name.startswith(prefix), islice(names, start, None))
    found = list(islice((name for name in below if name in objects), _LISTED_AT_ONCE + 1))
    contents = b"".join(
        b"<Contents><Key>%s</Key><Size>%d</Size></Contents>"
        % (name.removeprefix(head), len(objects[name]))
        for name in found[:_LISTED_AT_ONCE]
    )
    if len(found) > _LISTED_AT_ONCE:
        last = found[_LISTED_AT_ONCE - 1].removeprefix(head)
        rest = b"<NextContinuationToken>%s</NextContinuationToken>" % last
    else:
        rest = b""
    cut = b"true" if rest else b"false"
    return b"<ListBucketResult>%s<IsTruncated>%s</IsTruncated>%s</ListBucketResult>" % (
        contents,
        cut,
        rest,
    )


def send_xml(connection: socket.socket, text: bytes) -> None:
    """Send an answer with a body."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n"
    send(connection, [head % len(text), text])


def move(connection: socket.socket, sinks: bool, nbytes: int) -> None:  # noqa: FBT001 - one caller
    """Receive `nbytes` and acknowledge them, or send `nbytes`."""
    view = memoryview(block)
    while nbytes > 0:
        part = view[: min(nbytes, len(view))]
        nbytes -= connection.recv_into(part) if sinks else connection.send(part)
    if sinks:
        connection.sendall(b"!")


def send(connection: socket.socket, parts: list[bytes | bytearray]) -> None:
    views = [memoryview(part) for part in parts if part]
    if isinstance(connection, ssl.SSLSocket):  # it has no sendmsg
        for view in views:
            connection.sendall(view)
        return
    while views:
        sent = connection.sendmsg(views)
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if sent:
            views[0] = views[0][sent:]


def listen(context: ssl.SSLContext | None) -> int:
    """Accept connections on a thread. Return the port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            if context:
                connection = context.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def main() -> None:
    ports = [listen(None)]
    if len(sys.argv) > 1:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(sys.argv[1], sys.argv[2])
        ports.append(listen(context))
    print(*ports, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
