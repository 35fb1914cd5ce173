"""What a server says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_backends.redis._replies import ErrorReply

if TYPE_CHECKING:
    from hicache_backends.redis._node import Node
    from hicache_backends.redis._wire import Deadline


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
    if isinstance(told, ErrorReply):
        return ServerFacts(policy=None, evicted_keys=0, is_cluster=False)
    lines = (line.partition(b":")[::2] for line in told.splitlines())
    fields = {name.decode(): value.decode(errors="replace") for name, value in lines}
    return ServerFacts(
        policy=fields.get("maxmemory_policy"),
        evicted_keys=int(fields.get("evicted_keys", 0)),
        is_cluster=fields.get("cluster_enabled") == "1",
    )
