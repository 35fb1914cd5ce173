"""Replies to GET: a page is True only for its own bytes, whether C or Python reads them."""

from __future__ import annotations

import re
import socket
from typing import Any

from fuzz.choices import Choices
from fuzz.scratch import peer_of
from hicache_backends.redis.page_io import get_pages
from hicache_backends.redis.replies import ErrorReply, Reply, WrongReply

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.deadline_socket import DeadlineSocket
from hicache_storage.page import Page

_LINE = re.compile(rb".*?\r\n", re.DOTALL)
_SIZES = (1, 9, 12, 130)
_HIT, _MISS, _ERROR = b"$%d\r\n", b"$-1\r\n", b"-ERR no\r\n"

SEEDS = (
    b"",
    *(
        bytes([size, count, window, 0])
        + b"".join(
            {0: _MISS, 1: _ERROR}.get(kind, _HIT % _SIZES[size] + b"x" * _SIZES[size] + b"\r\n")
            for kind in kinds
        )
        for size in range(4)
        for count, window, kinds in ((2, 0, (2, 2, 2)), (3, 2, (2, 0, 2, 1)), (1, 1, (1, 2)))
    ),
)
TOKENS = (b"\r\n", b"$-1\r\n", b"-MOVED 1 h:1\r\n", b"$1\r\n", b"$12\r\n", b"*1\r\n", b":1\r\n")


class _EncryptedLike(DeadlineSocket):
    """A plain socket that is treated as an encrypted one, so that Python reads its replies."""

    @property
    def is_compiled(self) -> bool:
        return False


def check(data: bytes) -> None:
    choices = Choices(data)
    nbytes, count = choices.pick(_SIZES), choices.integer(1, 4)
    window, split = choices.integer(1, 4), choices.integer(0, 3)
    replies = choices.rest()
    by_plane = _settled(DeadlineSocket, replies, _pages(nbytes, count, split), window)
    by_python = _settled(_EncryptedLike, replies, _pages(nbytes, count, split), window)
    assert by_plane == by_python


def _settled(
    kind: type[DeadlineSocket], replies: bytes, pages: list[Page], window: int
) -> tuple[list[Any], str]:
    """Return what `get_pages` settles, and the name of the error that ended it."""
    settled: dict[int, Any] = {}

    def settle(position: int, reply: Reply) -> None:
        assert position == len(settled), "pages settle once, in the order of the requests"
        settled[position] = reply

    ended = ""
    with peer_of(replies) as near:
        try:
            get_pages(_over(kind, near), [b"key"] * len(pages), pages, window, settle)
        except WrongReply:
            ended = "wrong"
        except OSError:
            ended = "lost"
    verdicts = [settled[position] for position in range(len(settled))]
    assert all(isinstance(one, (bool, ErrorReply)) for one in verdicts)
    assert ended or len(verdicts) == len(pages)
    _check_pages([one is True for one in verdicts], pages, replies)
    return verdicts, ended


def _over(kind: type[DeadlineSocket], near: socket.socket) -> DeadlineSocket:
    return kind(near, Deadline(60))


def _pages(nbytes: int, count: int, split: int) -> list[Page]:
    return [
        Page(bytearray(min(split, nbytes)), bytearray(nbytes - min(split, nbytes)))
        for _ in range(count)
    ]


def _check_pages(hits: list[bool], pages: list[Page], replies: bytes) -> None:
    """Assert that each hit has the bytes of its bulk string, which a pattern finds in the replies."""
    at = 0
    for is_hit, page in zip(hits, pages, strict=False):
        header = _HIT % page.nbytes
        if is_hit:
            wanted = header + page.tobytes() + b"\r\n"
            assert replies[at : at + len(wanted)] == wanted
            at += len(wanted)
        else:
            line = _LINE.match(replies, at)
            at = line.end() if line else len(replies)
