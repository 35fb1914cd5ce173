"""The index of pages and key spaces: list and delete pages, and remove members that have no page.

Pages are found through the indices of the buckets, however many other keys the database has. If indices
may have been evicted, pages are found by a walk over the database instead. Either way a page is listed
only after its key was seen to exist. Pages are removed while other processes set the same pages:

    writer     ZADD GT index expiry hash      SET page        ZADD GT index expiry hash
    remover    ZADD XX index mark hash        UNLINK page     ZREMRANGEBYSCORE index mark mark

A remover gives the members a score of its own, the mark. When all of its pages are gone, it removes the
members that still have the mark. A writer that comes in between gives its member another score. So no
page is ever present without a member, whatever runs between two steps, whatever the server refuses, and
wherever a remover dies. The next listing finds members without a page. Marks are negative, so that every
expiry replaces them.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import TYPE_CHECKING

from hicache_backends.redis.layout import BUCKETS, SpaceKeys, key_of_any_space, registry
from hicache_backends.redis.replies import UNANSWERED, ErrorReply, Refused, WrongReply, items_of
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.manifest import (
    SPACE_ID,
    decode_manifest,
    encode_manifest,
    unreadable_space,
)
from hicache_storage.settings import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_backends.redis.batch import Router
    from hicache_backends.redis.replies import Command, Reply
    from hicache_backends.redis.server_pool import ServerPool
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import UnreadableSpace

logger: logging.Logger = logging.getLogger(__name__)

_BUCKETS_AT_ONCE = 32
_SCAN_COUNT = 512
"""The COUNT of one ZSCAN or SCAN."""
_SCAN_PARTS = 2
"""The items in a scan's reply: a cursor and a list."""
_CLOCK_SKEW_S = 60.0
_TRIM_SHARE = 1 / 16
"""After this share of set batches, expired members are removed from their buckets."""
_REGISTRATION_S = 10.0
"""For how long a manifest is assumed to stay. A process may delete it, or the server lose it."""
_MOST_SPACES = 4096
"""How many key spaces are remembered.

Clients decide how many there are, by their tenants and salts.
"""
_FIRST_MARK = 1 << 51
_LAST_MARK = 1 << 52
"""The bound for marks. Scores are floats, which are exact for integers below 2**53."""


class Index:
    """The index, as one storage uses it. Thread-safe."""

    def __init__(
        self, router: Router, prefix: str, timeout_s: float, *, is_read_only: bool = False
    ) -> None:
        self._router = router
        self._prefix = prefix
        self._registry = registry(prefix)
        self._is_read_only = is_read_only
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._opened: dict[KeySpace, float | None] = {}
        """When each manifest was last seen. None: unknown."""
        self._connections_made = 0

    # --- key spaces ------------------------------------------------------------------------------

    def register(self, space: KeySpace, deadline: Deadline) -> None:
        """Write the manifest of `space`, unless it was seen a short time ago."""
        connections_made = self._router.pools.connections_made
        with self._lock:
            if connections_made != self._connections_made:  # a server may have restarted empty
                self._connections_made = connections_made
                self._opened = dict.fromkeys(self._opened)
            seen_at_s = self._opened.get(space)
        if seen_at_s is None or time.monotonic() - seen_at_s > _REGISTRATION_S:
            self._register([space], deadline)

    def spaces(self) -> list[KeySpace]:
        """Return every key space that any process has registered, and those of this storage."""
        deadline = Deadline(self._timeout_s)
        with self._lock:
            opened = [*self._opened]
        self._register(opened, deadline)
        (reply,) = self._execute([("HVALS", self._registry)], deadline)
        registered = [space for space in map(decode_manifest, _items(reply)) if space is not None]
        return [*dict.fromkeys([*registered, *opened])]

    def unreadable_spaces(self) -> Iterator[UnreadableSpace]:
        """Yield the key spaces that have keys or a manifest, but whose manifest is lost or damaged.

        If the user may not walk through the database, which may contain keys of other programs, warn
        that none was looked for.
        """
        try:
            manifests = self._all_ids_and_manifests()
        except Refused as refusal:
            if refusal.reply.code != "NOPERM":
                raise
            logger.warning(
                "redis: key spaces that cannot be read were not looked for, because the user may not"
                " send SCAN or HGETALL: %s",
                refusal.reply.text,
            )
            return
        for space_id, manifest in sorted(manifests.items()):
            unreadable = unreadable_space(space_id, manifest)
            if unreadable is not None:
                yield unreadable

    def _all_ids_and_manifests(self) -> dict[str, bytes | None]:
        of_a_space = key_of_any_space(self._prefix)
        ids: set[str] = set()
        for keys in self._walk_all(f"{self._prefix}{{*"):
            ids |= {found["space"].decode() for found in map(of_a_space.fullmatch, keys) if found}
        (reply,) = self._execute([("HGETALL", self._registry)], Deadline(self._timeout_s))
        items = _items(reply)  # read last: a writer registers a key space before it sets a page
        found: dict[str, bytes | None] = dict.fromkeys(ids)
        for name, manifest in zip(items[::2], items[1::2], strict=False):
            if SPACE_ID.fullmatch(space_id := name.decode(errors="replace")):
                found[space_id] = manifest
        return found

    def remove_space(self, space_id: str) -> int:
        """Remove the pages, members and manifest of a key space. Return the number of pages.

        If new pages appear before the manifest is removed, it stays. If they appear afterwards, it
        is put back.
        """
        keys = SpaceKeys(self._prefix, space_id)
        (manifest,) = self._execute([("HGET", self._registry, space_id)], Deadline(self._timeout_s))
        space = decode_manifest(manifest, space_id=space_id)
        removed = 0
        for part in self._everything(keys, walks=space is None):
            gone = delete_pages(
                self._router, keys, [one for one, _ in part], Deadline(self._timeout_s)
            )
            if not all(gone):
                raise ConnectionError(
                    f"{counted(removed, 'page')} removed, but {gone.count(False)} of the"
                    f" next {len(gone)} are left: remove the key space again when all servers"
                    " answer"
                )
            removed += sum(space is None or nbytes == space.stored_nbytes for _, nbytes in part)
        if any(self._pages_of_indices(keys)):
            return removed
        self._execute([("HDEL", self._registry, space_id)], Deadline(self._timeout_s))
        with self._lock:
            self._opened = {one: at_s for one, at_s in self._opened.items() if one.id != space_id}
        if space is not None and any(self._pages_of_indices(keys)):
            self._register([space], Deadline(self._timeout_s))
        return removed

    def _register(self, spaces: Sequence[KeySpace], deadline: Deadline) -> None:
        manifests = {space.id: encode_manifest(space) for space in spaces}
        commands = [("HSETNX", self._registry, *item) for item in manifests.items()]
        replies = self._execute(commands, deadline)
        now_s = time.monotonic()
        with self._lock:
            for space, reply in zip(spaces, replies, strict=True):
                self._opened.pop(space, None)
                self._opened[space] = now_s if isinstance(reply, int) else None
            while len(self._opened) > _MOST_SPACES:  # clients decide how many
                del self._opened[next(iter(self._opened))]

    def _execute(self, commands: Sequence[Command], deadline: Deadline) -> list[Reply]:
        """Return the replies to commands on the registry.

        A full server does not count as a failure.
        """
        replies = self._router.execute([self._registry] * len(commands), commands, deadline)
        for reply in replies:
            if isinstance(reply, ErrorReply) and not reply.is_full:
                raise Refused(reply)
        return replies

    # --- pages -----------------------------------------------------------------------------------

    def pages(self, keys: SpaceKeys) -> Iterator[list[tuple[str, int | None]]]:
        """Yield the hash and length of everything under keys of pages, in parts.

        A length of None means that the value is not a page.
        """
        if self._has_whole_indices():
            yield from self._pages_of_indices(keys)
        else:
            yield from self._pages_of_walk(keys)

    def _everything(
        self, keys: SpaceKeys, *, walks: bool
    ) -> Iterator[list[tuple[str, int | None]]]:
        """Yield like `pages`, after removing the members that have no page."""
        yield from self._pages_of_indices(keys)
        if walks or not self._has_whole_indices():
            yield from self._pages_of_walk(keys)

    def trim(self, keys: SpaceKeys, hashes: Sequence[str], deadline: Deadline) -> None:
        """Remove expired members from the buckets of these pages, but only once in a while."""
        if random.random() > _TRIM_SHARE:
            return
        indices = [keys.index(bucket) for bucket in sorted({one[:2] for one in hashes})]
        until_s = time.time() - _CLOCK_SKEW_S
        # The range begins at 0, not at -inf, because a member with a mark may have a page.
        commands = [("ZREMRANGEBYSCORE", index, 0, until_s) for index in indices]
        self._router.execute(indices, commands, deadline)

    def _has_whole_indices(self) -> bool:
        """Return True if no index was evicted. Ask each time, because the servers' policy may change."""
        deadline = Deadline(self._timeout_s)
        servers = self._router.deployment.all_servers(deadline)
        return all(server.facts(deadline).has_whole_indices for server in servers)

    def _pages_of_indices(self, keys: SpaceKeys) -> Iterator[list[tuple[str, int | None]]]:
        for start in range(0, len(BUCKETS), _BUCKETS_AT_ONCE):
            seen: set[str] = set()
            for members in self._members(keys, BUCKETS[start : start + _BUCKETS_AT_ONCE]):
                fresh = [page_hash for page_hash in members if page_hash not in seen]
                seen.update(fresh)
                found = self.lengths(keys, fresh)
                absent = [page_hash for page_hash, nbytes in found if nbytes == 0]
                if not self._is_read_only:
                    prune(self._router, keys, absent, Deadline(self._timeout_s))
                if pages := [(page_hash, nbytes) for page_hash, nbytes in found if nbytes != 0]:
                    yield pages

    def _members(self, keys: SpaceKeys, buckets: Sequence[str]) -> Iterator[list[str]]:
        """Yield the members of the indices of `buckets`, in parts. A member may appear twice."""
        cursors = {keys.index(bucket): b"0" for bucket in buckets}
        while cursors:
            commands = [("ZSCAN", key, at, "COUNT", _SCAN_COUNT) for key, at in cursors.items()]
            replies = self._router.execute([*cursors], commands, Deadline(self._timeout_s))
            members: list[str] = []
            for key, reply in zip([*cursors], replies, strict=True):
                cursor, found = _parse_scan(reply)
                hashes = (keys.member(key, member) for member in found[::2])
                members += (page_hash for page_hash in hashes if page_hash is not None)
                cursors[key] = cursor
            cursors = {key: cursor for key, cursor in cursors.items() if cursor != b"0"}
            yield members

    def _pages_of_walk(self, keys: SpaceKeys) -> Iterator[list[tuple[str, int | None]]]:
        seen: set[str] = set()
        for page_keys in self._walk_all(keys.pattern):
            hashes = dict.fromkeys(map(keys.page_hash, page_keys))
            fresh = [one for one in hashes if one is not None and one not in seen]
            seen.update(fresh)
            found = self.lengths(keys, fresh)
            yield [(page_hash, nbytes) for page_hash, nbytes in found if nbytes != 0]

    def _walk_all(self, pattern: str) -> Iterator[list[bytes]]:
        """Yield the keys that match, in parts. A key may appear twice.

        A key that moves to a server that was already walked would be missed. So fail if slots move.
        """
        deployment = self._router.deployment
        before = deployment.placement(Deadline(self._timeout_s))
        for server in deployment.all_servers(Deadline(self._timeout_s)):
            yield from self._walk(server, pattern)
        if before != deployment.placement(Deadline(self._timeout_s)):
            raise ConnectionError("slots moved during the scan of the database: list again")

    def _walk(self, server: ServerPool, pattern: str) -> Iterator[list[bytes]]:
        cursor = b"0"
        while True:
            command = ("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
            with server.acquire(Deadline(self._timeout_s)) as connection:
                (reply,) = connection.execute([command])
            cursor, found = _parse_scan(reply)
            yield found
            if cursor == b"0":
                return

    def lengths(self, keys: SpaceKeys, hashes: Sequence[str]) -> list[tuple[str, int | None]]:
        """Return the length of each page: 0 for a missing page, None if the value is not a string."""
        page_keys = [keys.page(page_hash) for page_hash in hashes]
        if not page_keys:
            return []
        replies = self._router.lengths(page_keys, Deadline(self._timeout_s))
        return [
            (page_hash, _parse_length(reply))
            for page_hash, reply in zip(hashes, replies, strict=True)
        ]


# --- removing ------------------------------------------------------------------------------------


def delete_pages(
    router: Router, keys: SpaceKeys, hashes: Sequence[str], deadline: Deadline
) -> list[bool]:
    """Remove pages, then the members of the removed pages, in three round trips.

    Return True for each page that is gone.
    """
    members = _by_index(keys, hashes)
    mark = _new_mark()
    marked, full = _mark_members(router, members, dict.fromkeys(hashes, mark), deadline)
    page_keys = keys.pages(hashes)
    replies = router.execute(page_keys, [("UNLINK", key) for key in page_keys], deadline)
    kept = {one for one, reply in zip(hashes, replies, strict=True) if not isinstance(reply, int)}
    emptied = [index for index in marked if kept.isdisjoint(members[index])]
    commands: list[Command] = [("ZREMRANGEBYSCORE", index, mark, mark) for index in emptied]
    router.execute(emptied, commands, deadline)
    if full:  # A full server accepts no marks. By now the deleted pages have freed memory.
        prune(router, keys, [one for index in full for one in members[index]], deadline)
    return [page_hash not in kept for page_hash in hashes]


def prune(router: Router, keys: SpaceKeys, hashes: Sequence[str], deadline: Deadline) -> None:
    """Remove the members whose pages are missing, in three round trips."""
    if not hashes:
        return
    members = _by_index(keys, hashes)
    first = _new_mark()
    marks = {page_hash: first - number for number, page_hash in enumerate(dict.fromkeys(hashes))}
    marked, _ = _mark_members(router, members, marks, deadline)
    suspects = [(index, one) for index in marked for one in members[index]]
    page_keys = [keys.page(page_hash) for _, page_hash in suspects]
    lengths = router.lengths(page_keys, deadline)
    gone = [one for one, length in zip(suspects, lengths, strict=True) if length == 0]
    commands = [("ZREMRANGEBYSCORE", index, marks[one], marks[one]) for index, one in gone]
    router.execute([index for index, _ in gone], commands, deadline)


def _by_index(keys: SpaceKeys, hashes: Sequence[str]) -> dict[bytes, list[str]]:
    members: dict[bytes, list[str]] = {}
    for page_hash in dict.fromkeys(hashes):
        members.setdefault(keys.index(page_hash[:2]), []).append(page_hash)
    return members


def _mark_members(
    router: Router,
    members: dict[bytes, list[str]],
    marks: dict[str, int],
    deadline: Deadline,
) -> tuple[list[bytes], list[bytes]]:
    """Mark the members that exist. Return the indices that accepted marks, and those on full servers."""
    commands: list[Command] = [
        ("ZADD", index, "XX", *(part for one in hashes for part in (marks[one], one)))
        for index, hashes in members.items()
    ]
    replies = dict(zip(members, router.execute([*members], commands, deadline), strict=True))
    marked = [index for index, reply in replies.items() if isinstance(reply, int)]
    full = [
        index for index, reply in replies.items() if isinstance(reply, ErrorReply) and reply.is_full
    ]
    return marked, full


def _new_mark() -> int:
    """Return a random score. The scores below it are free for the other members of a batch."""
    return -random.randrange(_FIRST_MARK, _LAST_MARK)


# --- replies -------------------------------------------------------------------------------------


def _parse_length(reply: Reply) -> int | None:
    """Return a length, or None if the value is not a string."""
    if isinstance(reply, ErrorReply):
        if reply.is_about_the_key:
            return None
        raise Refused(reply)
    if not isinstance(reply, int):
        raise ConnectionError("the server did not answer a part of a listing")
    return reply


def _items(reply: Reply) -> list[bytes]:
    if isinstance(reply, ErrorReply):
        raise Refused(reply)
    items = items_of(reply)
    if items is None or not all(isinstance(item, bytes) for item in items):
        raise WrongReply("a listing has an unexpected form")
    return items


def _parse_scan(reply: Reply) -> tuple[bytes, list[bytes]]:
    """Return the cursor and the items of a scan.

    Raise if the reply is malformed, because an incomplete listing must not pass as a whole one.
    """
    if isinstance(reply, ErrorReply):
        raise Refused(reply)
    if reply is UNANSWERED:
        raise ConnectionError("the server did not answer a part of a listing")
    parts = items_of(reply)
    if parts is None or len(parts) != _SCAN_PARTS or not isinstance(parts[0], bytes):
        raise WrongReply("a listing has an unexpected form")
    return parts[0], _items(parts[1])
