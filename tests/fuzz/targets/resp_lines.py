"""Replies to SET and ZADD: C and Python read the same replies."""

from __future__ import annotations

from typing import Any

from fuzz.choices import Choices
from fuzz.scratch import peer_of
from fuzz.targets.resp_pages import _EncryptedLike
from hicache_backends.redis.page_io import PageRequest, set_pages
from hicache_backends.redis.replies import ErrorReply, Reply, WrongReply

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.deadline_socket import DeadlineSocket
from hicache_storage.page import Page

_LINES = (b"+OK\r\n", b"$-1\r\n", b":1\r\n", b"-OOM no\r\n", b"-MOVED 1 h:1\r\n", b":0\r\n")

SEEDS = (
    b"",
    *(
        bytes([count, window, listed]) + b":1\r\n+OK\r\n:0\r\n" * 4
        for count in (0, 3)
        for window in (0, 3)
        for listed in (0, 1)
    ),
    *(b"\3\1\0" + line * 4 for line in _LINES),
    b"\0\0\0:" + b"9" * 4400 + b"\r\n",
    b"\0\0\0:" + b"9" * 4090 + b"\r\n",
)
TOKENS = (*_LINES, b"\r\n", b"\n", b"\r", b"*1\r\n")


def check(data: bytes) -> None:
    choices = Choices(data)
    count, window = choices.integer(1, 4), choices.integer(1, 4)
    is_listed = choices.flag()
    replies = choices.rest()
    command = (b"ZADD", b"index") if is_listed else ()
    requests = [PageRequest(b"key", 1, index_command=command)] * count
    by_plane, plane_error = _settled(DeadlineSocket, replies, requests, window)
    by_python, python_error = _settled(_EncryptedLike, replies, requests, window)
    shorter = min(len(by_plane), len(by_python))
    assert by_plane[:shorter] == by_python[:shorter]
    if not plane_error:
        assert (by_plane, "") == (by_python, python_error)


def _settled(
    kind: type[DeadlineSocket], replies: bytes, requests: list[PageRequest], window: int
) -> tuple[list[Any], str]:
    """Return the replies that `set_pages` settles, and the name of the error that ended it."""
    settled: list[Any] = []

    def settle(position: int, some: Reply) -> None:
        assert position == len(settled)
        settled.append(some)

    ended = ""
    with peer_of(replies) as near:
        try:
            sock = kind(near, Deadline(60))
            set_pages(sock, requests, [Page(b"p")] * len(requests), window, settle)
        except WrongReply:
            ended = "wrong"
        except OSError:
            ended = "lost"
    for some in settled:
        assert len(some) in (1, 3)
        assert all(one is None or isinstance(one, (bool, int, ErrorReply)) for one in some)
    assert ended or len(settled) == len(requests)
    return settled, ended
