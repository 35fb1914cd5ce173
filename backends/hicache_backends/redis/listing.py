"""Which pages and key spaces there are.

Pages are found by the indices of their buckets, however many other keys the database has; where indices
may have been evicted, by walking the database. Either way a page is listed when it is seen to be there.
"""

from __future__ import annotations

import json
import random
import threading
import time
from typing import TYPE_CHECKING

from hicache_backends.redis.index import prune
from hicache_backends.redis.layout import BUCKETS, registry
from hicache_backends.redis.replies import UNANSWERED, ErrorReply, Refused, WrongReply, items_of
from hicache_backends.redis.server_facts import facts_of
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.keys import KeySpace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_backends.redis.batch import Router
    from hicache_backends.redis.layout import SpaceKeys
    from hicache_backends.redis.replies import Command, Reply
    from hicache_backends.redis.server_pool import Node

_BUCKETS_AT_ONCE = 32
_STEP = 512
"""What one ZSCAN or SCAN looks at."""
_SCAN_PARTS = 2
"""Of a reply: a cursor, and what was found."""
_CLOCKS_APART_S = 60.0
_TRIM_SHARE = 1 / 16
"""Of the batches that are set: their buckets lose what has expired."""
_REGISTRATION_S = 10.0
"""For how long a manifest is taken to be there: others may delete it, or the server lose it."""


class Listing:
    """The listings of one storage. Thread-safe."""

    def __init__(self, router: Router, prefix: str, timeout_s: float) -> None:
        self._router = router
        self._registry = registry(prefix)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._opened: dict[KeySpace, float | None] = {}
        """When its manifest was last seen to be there; None: it has to be looked at."""
        self._connections = 0

    # --- key spaces ------------------------------------------------------------------------------

    def register(self, space: KeySpace, deadline: Deadline) -> None:
        """See to it that `space` is listed, as far as that is not certain."""
        made = self._router.nodes.connections_made
        with self._lock:
            if made != self._connections:  # to a server that may have been started anew, and empty
                self._connections = made
                self._opened = dict.fromkeys(self._opened)
            seen_at_s = self._opened.get(space)
        if seen_at_s is None or time.monotonic() - seen_at_s > _REGISTRATION_S:
            self._register([space], deadline)

    def known(self) -> list[KeySpace]:
        """Every key space that was registered, by whomever, and those of this storage."""
        deadline = Deadline(self._timeout_s)
        with self._lock:
            opened = [*self._opened]
        self._register(opened, deadline)
        (told,) = self._asked([("HVALS", self._registry)], deadline)
        registered = [space for space in map(_space_of, _items(told)) if space is not None]
        return [*dict.fromkeys([*registered, *opened])]

    def _register(self, spaces: Sequence[KeySpace], deadline: Deadline) -> None:
        manifests = {space.id: json.dumps(space.manifest()) for space in spaces}
        commands = [("HSETNX", self._registry, *item) for item in manifests.items()]
        replies = self._asked(commands, deadline)
        now_s = time.monotonic()
        with self._lock:
            for space, reply in zip(spaces, replies, strict=True):
                self._opened[space] = now_s if isinstance(reply, int) else None

    def _asked(self, commands: Sequence[Command], deadline: Deadline) -> list[Reply]:
        """The replies to commands about the registry; a server without room is no failure."""
        replies = self._router.ask([self._registry] * len(commands), commands, deadline)
        for reply in replies:
            if isinstance(reply, ErrorReply) and not reply.is_full:
                raise Refused(reply)
        return replies

    # --- pages -----------------------------------------------------------------------------------

    def pages(self, keys: SpaceKeys) -> Iterator[list[tuple[str, int | None]]]:
        """Hash and length of everything that lies where pages do, in parts; None: it is no page."""
        if self._has_whole_indices():
            yield from self._indexed(keys)
        else:
            yield from self._walked(keys)

    def trim(self, keys: SpaceKeys, hashes: Sequence[str], deadline: Deadline) -> None:
        """Now and then forget, in the buckets of these pages, what has expired."""
        if random.random() > _TRIM_SHARE:
            return
        indices = [keys.index(bucket) for bucket in sorted({one[:2] for one in hashes})]
        until_s = time.time() - _CLOCKS_APART_S
        # From 0, not from -inf: what a remover has marked may be a page that is there.
        commands = [("ZREMRANGEBYSCORE", index, 0, until_s) for index in indices]
        self._router.ask(indices, commands, deadline)

    def _has_whole_indices(self) -> bool:
        """Asked anew each time: the policy may be changed while a storage is open."""
        deadline = Deadline(self._timeout_s)
        nodes = self._router.topology.all_nodes(deadline)
        return all(facts_of(node, deadline).has_whole_indices for node in nodes)

    def _indexed(self, keys: SpaceKeys) -> Iterator[list[tuple[str, int | None]]]:
        for start in range(0, len(BUCKETS), _BUCKETS_AT_ONCE):
            seen: set[str] = set()
            for listed in self._members(keys, BUCKETS[start : start + _BUCKETS_AT_ONCE]):
                fresh = [page_hash for page_hash in listed if page_hash not in seen]
                seen.update(fresh)
                found = self._measured(keys, fresh)
                absent = [page_hash for page_hash, nbytes in found if nbytes == 0]
                prune(self._router, keys, absent, Deadline(self._timeout_s))
                yield [(page_hash, nbytes) for page_hash, nbytes in found if nbytes != 0]

    def _members(self, keys: SpaceKeys, buckets: Sequence[str]) -> Iterator[list[str]]:
        """The members of the indices of these buckets, in parts; some may come twice."""
        cursors = {keys.index(bucket): b"0" for bucket in buckets}
        while cursors:
            commands = [("ZSCAN", key, at, "COUNT", _STEP) for key, at in cursors.items()]
            replies = self._router.ask([*cursors], commands, Deadline(self._timeout_s))
            members: list[str] = []
            for key, reply in zip([*cursors], replies, strict=True):
                cursor, found = _whole(reply)
                named = (keys.member(key, member) for member in found[::2])
                members += (page_hash for page_hash in named if page_hash is not None)
                cursors[key] = cursor
            cursors = {key: cursor for key, cursor in cursors.items() if cursor != b"0"}
            yield members

    def _walked(self, keys: SpaceKeys) -> Iterator[list[tuple[str, int | None]]]:
        seen: set[str] = set()
        nodes = self._all_nodes()
        for node in nodes:
            for page_hashes in self._passed(node, keys):
                fresh = [page_hash for page_hash in page_hashes if page_hash not in seen]
                seen.update(fresh)
                found = self._measured(keys, fresh)
                yield [(page_hash, nbytes) for page_hash, nbytes in found if nbytes != 0]
        self._router.topology.doubt()
        if set(nodes) != set(self._all_nodes()):
            raise ConnectionError("servers came or went while they were walked: list again")

    def _all_nodes(self) -> list[Node]:
        return self._router.topology.all_nodes(Deadline(self._timeout_s))

    def _passed(self, node: Node, keys: SpaceKeys) -> Iterator[list[str]]:
        """Page hashes of the keys that a walk over one server passes; some may come twice."""
        cursor = b"0"
        while True:
            with node.lent(Deadline(self._timeout_s)) as link:
                (reply,) = link.exchange([("SCAN", cursor, "MATCH", keys.pattern, "COUNT", _STEP)])
            cursor, found = _whole(reply)
            named = [keys.page_hash(key) for key in found]
            yield list(dict.fromkeys(page_hash for page_hash in named if page_hash is not None))
            if cursor == b"0":
                return

    def _measured(self, keys: SpaceKeys, hashes: Sequence[str]) -> list[tuple[str, int | None]]:
        """With each page its length: 0 where there is nothing, None where there is no string."""
        page_keys = [keys.page(page_hash) for page_hash in hashes]
        if not page_keys:
            return []
        commands = [("STRLEN", key) for key in page_keys]
        replies = self._router.ask(page_keys, commands, Deadline(self._timeout_s))
        return [
            (page_hash, _measure(reply)) for page_hash, reply in zip(hashes, replies, strict=True)
        ]


def _measure(reply: Reply) -> int | None:
    """A length; None where there is no string. What was not answered is neither."""
    if isinstance(reply, ErrorReply):
        if reply.is_about_the_key:
            return None
        raise Refused(reply)
    if not isinstance(reply, int):
        raise ConnectionError("a part of a listing was not answered")
    return reply


def _space_of(manifest: bytes) -> KeySpace | None:
    """None for what this release did not write."""
    try:
        return KeySpace.from_manifest(json.loads(manifest))
    except (ValueError, RecursionError):
        return None


def _items(reply: Reply) -> list[bytes]:
    if isinstance(reply, ErrorReply):
        raise Refused(reply)
    items = items_of(reply)
    if items is None or not all(isinstance(item, bytes) for item in items):
        raise WrongReply("a listing has another form")
    return items


def _whole(reply: Reply) -> tuple[bytes, list[bytes]]:
    """Cursor and items of a scan. Half a listing must not pass for the whole."""
    if isinstance(reply, ErrorReply):
        raise Refused(reply)
    if reply is UNANSWERED:
        raise ConnectionError("a part of a listing was not answered")
    parts = items_of(reply)
    if parts is None or len(parts) != _SCAN_PARTS or not isinstance(parts[0], bytes):
        raise WrongReply("a listing has another form")
    return parts[0], _items(parts[1])
