"""The part of a storage that belongs to one process: connections, and the calls over them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_backends.redis.access import Address
from hicache_backends.redis.batch import Router
from hicache_backends.redis.cluster import Cluster, SingleServer
from hicache_backends.redis.index import Index, delete_pages
from hicache_backends.redis.layout import SpaceKeys
from hicache_backends.redis.page_io import PageRequest
from hicache_backends.redis.replies import UNANSWERED, ErrorReply
from hicache_backends.redis.sentinel import SentinelMaster
from hicache_backends.redis.server_pool import ServerPools
from hicache_storage.backend_support.answers import answers_of
from hicache_storage.backend_support.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.redis.access import Access
    from hicache_backends.redis.cluster import Deployment
    from hicache_backends.redis.replies import Reply
    from hicache_backends.redis.server_pool import ServerFacts
    from hicache_backends.redis.settings import RedisSettings
    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

_CLOSE_LIMIT_S = 10.0
_MS = 1000
_DIRECTIONS = 2
"""Gets and sets. Each direction has `parallelism` connections, so gets do not wait for sets."""


class Session:
    """The part of a storage that a forked child must not use. Thread-safe.

    Every method may raise OSError and RedisError.
    """

    def __init__(
        self,
        settings: RedisSettings,
        servers: Access,
        sentinels: Access,
        counters: Counters,
        *,
        is_cluster: bool,
        is_read_only: bool = False,
    ) -> None:
        self._settings = settings
        self._counters = counters
        self.pools = ServerPools(servers, _DIRECTIONS * settings.parallelism)
        self._sentinel_pools = ServerPools(sentinels, 1)
        self.deployment = self._new_deployment(is_cluster=is_cluster)
        self._router = Router(self.pools, self.deployment, counters, settings.depth)
        self.index = Index(
            self._router, settings.prefix, settings.timeout_s, is_read_only=is_read_only
        )

    def facts(self, deadline: Deadline) -> list[ServerFacts]:
        """Return the facts of each server."""
        return [server.facts(deadline) for server in self.deployment.all_servers(deadline)]

    def exists(self, space: KeySpace, hashes: Sequence[str], deadline: Deadline) -> list[bool]:
        lengths = self._lengths(self.keys(space).pages(hashes), deadline)
        return answers_of(
            [None if length is UNANSWERED else length == space.stored_nbytes for length in lengths]
        )

    def get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page], deadline: Deadline
    ) -> list[bool]:
        replies = self._router.get(self.keys(space).pages(hashes), pages, deadline)
        return answers_of(
            [None if _length(reply) is UNANSWERED else reply is True for reply in replies]
        )

    def set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page], deadline: Deadline
    ) -> list[bool]:
        keys = self.keys(space)
        self.index.register(space, deadline)
        verdicts = self._set(keys, space.stored_nbytes, hashes, pages, deadline)
        self.index.register(space, deadline)  # a new connection may have reached an empty server
        if self._settings.ttl_s is not None:
            self.index.trim(keys, hashes, deadline)
        return verdicts

    def delete(self, space: KeySpace, hashes: Sequence[str], deadline: Deadline) -> list[bool]:
        return delete_pages(self._router, self.keys(space), hashes, deadline)

    def keys(self, space: KeySpace) -> SpaceKeys:
        return SpaceKeys(self._settings.prefix, space.id)

    def close(self) -> None:
        """End all connections, then wait for the calls that used them."""
        all_pools = (self.pools, self._sentinel_pools)
        for pools in all_pools:
            pools.close()
        deadline = Deadline(_CLOSE_LIMIT_S)
        for pools in all_pools:
            pools.wait_closed(deadline)

    # --- parts -----------------------------------------------------------------------------------

    def _set(
        self,
        keys: SpaceKeys,
        nbytes: int,
        hashes: Sequence[str],
        pages: Sequence[Page],
        deadline: Deadline,
    ) -> list[bool]:
        """Send the missing pages. A page of another writer stays; a damaged page is overwritten."""
        verdicts = [False] * len(hashes)
        todo = [position for position, page in enumerate(pages) if page.nbytes == nbytes]
        for keep in (True, False):
            lengths = self._lengths(keys.pages([hashes[position] for position in todo]), deadline)
            requests: dict[int, PageRequest] = {}
            for position, length in zip(todo, lengths, strict=True):
                verdicts[position] = length == nbytes
                if not verdicts[position] and length is not UNANSWERED:
                    kept = keep and length == 0
                    requests[position] = self._request(keys, nbytes, hashes[position], keep=kept)
            sent = [pages[position] for position in requests]
            replies = self._router.set([*requests.values()], sent, deadline)
            todo.clear()
            for position, reply in zip(requests, replies, strict=True):
                verdicts[position] = reply is True
                if reply is None:
                    todo.append(position)
                elif isinstance(reply, ErrorReply) and reply.is_full:
                    self._counters.add("refused_no_space")
            if not todo:
                break
        return verdicts

    def _request(self, keys: SpaceKeys, nbytes: int, page_hash: str, *, keep: bool) -> PageRequest:
        index, ttl_s = keys.index(page_hash[:2]), self._settings.ttl_s
        expires_s = b"+inf" if ttl_s is None else b"%.3f" % (time.time() + ttl_s)
        expiry = () if ttl_s is None else (b"PX", b"%d" % (ttl_s * _MS))
        return PageRequest(
            key=keys.page(page_hash),
            nbytes=nbytes,
            options=(*((b"NX",) if keep else ()), *expiry),
            # GT: another process may have set the page with a later expiry.
            index_command=(b"ZADD", index, b"GT", expires_s, page_hash.encode()),
        )

    def _lengths(self, page_keys: Sequence[bytes], deadline: Deadline) -> list[Reply]:
        """Return the length of each key's value, or None if the value is not a string."""
        return [_length(reply) for reply in self._router.lengths(page_keys, deadline)]

    def _new_deployment(self, *, is_cluster: bool) -> Deployment:
        settings = self._settings
        if settings.sentinel_master is not None:
            addresses = [Address.parse(text) for text in settings.sentinels]
            master = settings.sentinel_master
            return SentinelMaster(self.pools, self._sentinel_pools, addresses, master)
        if is_cluster:
            return Cluster(self.pools, settings.address)
        return SingleServer(self.pools.at(settings.address))


def _length(reply: Reply) -> Reply:
    if not isinstance(reply, ErrorReply):
        return reply
    return None if reply.is_about_the_key else UNANSWERED
