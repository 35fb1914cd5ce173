"""The master that sentinels name."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hicache_backends.redis.address import Address
from hicache_backends.redis.replies import FAILURES, TIMEOUTS, ErrorReply, Refused, Reply, items_of
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import StorageTimeout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.redis.nodes import Nodes
    from hicache_backends.redis.server_pool import Node

_SHARE = 0.4
"""Of what is left of a call: what all sentinels together may take."""
_DOWN = frozenset({"s_down", "o_down", "disconnected"})


class SentinelMaster:
    """Finds a master by its name. Thread-safe."""

    def __init__(
        self, nodes: Nodes, sentinels: Nodes, addresses: Sequence[Address], name: str
    ) -> None:
        self._nodes = nodes
        self._sentinels = sentinels
        self._addresses = addresses
        self._name = name
        self._lock = threading.Lock()
        self._master: Node | None = None

    def node_of(self, key: bytes, deadline: Deadline) -> Node:  # noqa: ARG002 - it has all
        master = self._master
        if master is not None:
            return master
        if not self._lock.acquire(timeout=deadline.remaining_s()):
            raise StorageTimeout(
                f"the master was being looked for by others for {deadline.timeout_s:g} s"
            )
        try:
            if self._master is None:
                self._master = self._nodes.at(self._asked(deadline))
            return self._master
        finally:
            self._lock.release()

    def all_nodes(self, deadline: Deadline) -> list[Node]:
        return [self.node_of(b"", deadline)]

    def doubt(self) -> None:
        self._master = None

    def _asked(self, deadline: Deadline) -> Address:
        """Return the master's address as the first sentinel that knows it has it."""
        budget = Deadline(deadline.remaining_s() * _SHARE)
        complaints: list[str] = []
        timed_out = False
        for index, address in enumerate(self._addresses):
            share_s = budget.remaining_s() / (len(self._addresses) - index)
            try:
                master = self._told_by(self._sentinels.at(address), Deadline(share_s))
            except FAILURES as error:
                timed_out |= isinstance(error, TIMEOUTS)
                complaints.append(f"{address}: {error}")
                continue
            if master is not None:
                return master
            complaints.append(f"{address}: it knows no such master that is up")
        kind = StorageTimeout if timed_out else ConnectionError
        raise kind(f"no sentinel names the master {self._name!r}: {'; '.join(complaints)}")

    def _told_by(self, sentinel: Node, deadline: Deadline) -> Address | None:
        with sentinel.lent(deadline) as link:
            (reply,) = link.exchange([("SENTINEL", "MASTERS")])
        if isinstance(reply, ErrorReply):
            raise Refused(reply)
        for told in items_of(reply) or []:
            fields = _fields(told)
            if fields.get("name") != self._name or "master" not in fields["flags"].split(","):
                continue
            if not _DOWN.intersection(fields["flags"].split(",")):
                return _address(fields)
        return None


def _fields(told: Reply) -> dict[str, str]:
    """Return what a sentinel tells of one master; flags are always there."""
    words = items_of(told) or []
    texts = [one.decode(errors="replace") if isinstance(one, bytes) else "" for one in words]
    return {"flags": "", **dict(zip(texts[::2], texts[1::2], strict=False))}


def _address(fields: dict[str, str]) -> Address:
    try:
        return Address.parse(f"{fields.get('ip', '')}:{fields.get('port', '')}")
    except ValueError:
        raise ConnectionError("it names no address of the master") from None
