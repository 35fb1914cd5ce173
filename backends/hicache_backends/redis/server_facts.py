"""What a server says of itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_backends.redis.server_pool import Node
    from hicache_storage.backend_support.deadline import Deadline

_NUMBER = re.compile(r"[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A part of INFO. Where it is forbidden nothing is known."""

    policy: str | None
    """`maxmemory-policy`. CONFIG would tell it too, and is forbidden on many managed servers."""
    evicted_keys: int
    """Since the server was started."""
    is_cluster: bool

    @property
    def may_evict_anything(self) -> bool:
        """Whether keys that never expire may go, so that what lists pages may go before them."""
        return self.policy is None or self.policy.startswith("allkeys")

    @property
    def has_whole_indices(self) -> bool:
        """Whether no index can have been evicted; the policy may have been another one before."""
        if self.may_evict_anything or self.policy is None:
            return False
        return self.evicted_keys == 0 or self.policy.startswith("volatile")


def facts_of(node: Node, deadline: Deadline) -> ServerFacts:
    """Ask a server.

    Raises:
        OSError, RedisError: It does not answer.
    """
    with node.lent(deadline) as link:
        (told,) = link.exchange([("INFO",)])
    text = told.decode(errors="replace") if isinstance(told, bytes) else ""
    lines = (line.partition(":") for line in text.splitlines())
    fields = {name: value for name, _, value in lines}
    evicted = fields.get("evicted_keys", "0")
    return ServerFacts(
        policy=fields.get("maxmemory_policy"),
        # What is no number may be any: indices are trusted only where none was evicted.
        evicted_keys=int(evicted) if _NUMBER.fullmatch(evicted) else 1,
        is_cluster=fields.get("cluster_enabled") == "1",
    )
