"""What became of pages that were on their way when their connection failed.

A server that hangs may carry out later what it has in its buffers. So that a page whose set returned
False never shows, the old connection is ended at the server's side before anybody looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_backends.redis.replies import FAILURES, ErrorReply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.redis.page_io import PageRequest
    from hicache_backends.redis.replies import Reply
    from hicache_backends.redis.server_pool import Node
    from hicache_storage.backend_support.deadline import Deadline


class InDoubt(Exception):
    """Pages were on their way when a connection failed. The cause is what it failed with."""

    def __init__(self, identity: tuple[bytes, bytes] | None) -> None:
        super().__init__("the connection failed while pages were on their way")
        self.identity = identity


def settled(
    node: Node, doubt: InDoubt, requests: Sequence[PageRequest], deadline: Deadline
) -> list[bool]:
    """Whether each page is stored now; where it is not, it will not show later.

    Raises:
        OSError, RedisError: That cannot be found out: what the connection failed with.
    """
    assert isinstance(doubt.__cause__, FAILURES)
    if doubt.identity is None:
        raise doubt.__cause__
    number, sender = doubt.identity
    try:
        with node.lent(deadline) as link:
            commands = [("STRLEN", request.key) for request in requests]
            killed, *lengths = link.exchange(
                [("CLIENT", "KILL", "ID", number, "ADDR", sender), *commands]
            )
    except FAILURES:
        raise doubt.__cause__ from None
    if not isinstance(killed, int) or any(map(_says_nothing, lengths)):
        raise doubt.__cause__
    return [length == request.nbytes for length, request in zip(lengths, requests, strict=True)]


def _says_nothing(length: Reply) -> bool:
    """Whether a reply leaves open what is stored: the slot has moved meanwhile, the server loads..."""
    if isinstance(length, ErrorReply):
        return not length.is_about_the_key
    return not isinstance(length, int)
