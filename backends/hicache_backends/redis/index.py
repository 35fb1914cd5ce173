"""Taking pages out of their indices while others set the same pages.

    writer     ZADD GT index expiry hash      SET page        ZADD GT index expiry hash
    remover    ZADD XX index mark hash        UNLINK page     ZREMRANGEBYSCORE index mark mark

A remover gives the members a score of its own, the mark, and takes out what still has that score at the
end, where all of its pages are gone. Whoever sets a page in between gives its member another score: no
page is ever there without a member, whatever comes between two steps, whatever the server refuses, and
wherever a remover dies. A member without a page is found by the next listing. Marks are negative, so
that every time at which a page expires replaces them.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hicache_backends.redis.replies import ErrorReply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.redis.batch import Router
    from hicache_backends.redis.layout import SpaceKeys
    from hicache_backends.redis.replies import Command
    from hicache_storage.backend_support.deadline import Deadline

_FIRST_MARK = 1 << 51
_LAST_MARK = 1 << 52
"""Whole numbers below 2 to the 53 are exact as scores."""


def delete_pages(
    router: Router, keys: SpaceKeys, hashes: Sequence[str], deadline: Deadline
) -> list[bool]:
    """Remove pages, then the members of those that are gone. True: it is gone. Three round trips."""
    members = _by_index(keys, hashes)
    mark = _new_mark()
    marked, full = _marked(router, members, dict.fromkeys(hashes, mark), deadline)
    page_keys = keys.pages(hashes)
    replies = router.ask(page_keys, [("UNLINK", key) for key in page_keys], deadline)
    kept = {one for one, reply in zip(hashes, replies, strict=True) if not isinstance(reply, int)}
    emptied = [index for index in marked if kept.isdisjoint(members[index])]
    router.ask(emptied, [("ZREMRANGEBYSCORE", index, mark, mark) for index in emptied], deadline)
    if full:  # a full server takes no marks; there may be room now
        prune(router, keys, [one for index in full for one in members[index]], deadline)
    return [page_hash not in kept for page_hash in hashes]


def prune(router: Router, keys: SpaceKeys, hashes: Sequence[str], deadline: Deadline) -> None:
    """Remove the members whose pages are not there. Three round trips."""
    if not hashes:
        return
    members = _by_index(keys, hashes)
    first = _new_mark()
    marks = {page_hash: first - number for number, page_hash in enumerate(dict.fromkeys(hashes))}
    marked, _ = _marked(router, members, marks, deadline)
    suspects = [(index, one) for index in marked for one in members[index]]
    page_keys = [keys.page(page_hash) for _, page_hash in suspects]
    lengths = router.ask(page_keys, [("STRLEN", key) for key in page_keys], deadline)
    gone = [one for one, length in zip(suspects, lengths, strict=True) if length == 0]
    commands = [("ZREMRANGEBYSCORE", index, marks[one], marks[one]) for index, one in gone]
    router.ask([index for index, _ in gone], commands, deadline)


def _by_index(keys: SpaceKeys, hashes: Sequence[str]) -> dict[bytes, list[str]]:
    members: dict[bytes, list[str]] = {}
    for page_hash in dict.fromkeys(hashes):
        members.setdefault(keys.index(page_hash[:2]), []).append(page_hash)
    return members


def _marked(
    router: Router,
    members: dict[bytes, list[str]],
    marks: dict[str, int],
    deadline: Deadline,
) -> tuple[list[bytes], list[bytes]]:
    """Mark members that are there. The indices that took it, and those for which there is no room."""
    commands: list[Command] = [
        ("ZADD", index, "XX", *(part for one in named for part in (marks[one], one)))
        for index, named in members.items()
    ]
    replies = dict(zip(members, router.ask([*members], commands, deadline), strict=True))
    marked = [index for index, reply in replies.items() if isinstance(reply, int)]
    full = [
        index for index, reply in replies.items() if isinstance(reply, ErrorReply) and reply.is_full
    ]
    return marked, full


def _new_mark() -> int:
    """A score that nobody else uses, with room below it for those of a batch."""
    return -random.randrange(_FIRST_MARK, _LAST_MARK)
