"""Writes in doubt: their connection failed, so we do not know which pages are stored.

A server that hangs may later carry out the writes in its buffers. But a page whose set returned
False must not appear then. So we end the failed connection on the server before we resolve its
writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_backends.redis.replies import FAILURES, ErrorReply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.redis.page_io import PageRequest
    from hicache_backends.redis.replies import Reply
    from hicache_backends.redis.server_pool import ServerPool
    from hicache_storage.backend_support.deadline import Deadline


class WritesInDoubt(Exception):
    """A connection failed while pages were in flight. `__cause__` is the connection's error."""

    def __init__(self, identity: tuple[bytes, bytes] | None) -> None:
        super().__init__("the connection failed while pages were on their way")
        self.identity = identity


def resolve_writes(
    server: ServerPool,
    doubt: WritesInDoubt,
    requests: Sequence[PageRequest],
    deadline: Deadline,
) -> list[bool]:
    """Return True for each page that is stored. A page that is not stored will not appear later.

    Raises:
        OSError, RedisError: We cannot find out. The error is the connection's failure.
    """
    assert isinstance(doubt.__cause__, FAILURES)
    if doubt.identity is None:
        raise doubt.__cause__
    client_id, client_address = doubt.identity
    try:
        with server.acquire(deadline) as connection:
            commands = [("STRLEN", request.key) for request in requests]
            killed, *lengths = connection.execute(
                [("CLIENT", "KILL", "ID", client_id, "ADDR", client_address), *commands]
            )
    except FAILURES:
        raise doubt.__cause__ from None
    if not isinstance(killed, int) or any(map(_is_inconclusive, lengths)):
        raise doubt.__cause__
    return [length == request.nbytes for length, request in zip(lengths, requests, strict=True)]


def _is_inconclusive(length: Reply) -> bool:
    """Return True if a reply does not show what is stored, for example if the slot has moved."""
    if isinstance(length, ErrorReply):
        return not length.is_about_the_key
    return not isinstance(length, int)
