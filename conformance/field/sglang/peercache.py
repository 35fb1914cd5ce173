"""PeerCache's `PeerCacheStore`: a client of a storage server, as SGLang's `dynamic` backend calls it."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any, ClassVar, Self

from field.adapter import NO_CLEAR
from field.sglang.engine import EngineSettings, module, page_keys
from field.sglang.zero_copy import ZeroCopyStorage, pool_name
from hicache_storage.storage import Capabilities, Durability, Retention

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.keys import KeySpace

_SETTLE_LIMIT_S = 20.0
"""How long to wait for a group, which keeps a node that was killed for its `member_ttl`."""
_POLL_S = 0.05
_ANSWER_LIMIT_S = 2.0


class PeerCache(ZeroCopyStorage):
    """`peercache.store.PeerCacheStore` in its mode `centralized`, over TCP.

    `extra_config` holds the store's fields. The pages are in the memory of the storage server, but
    their places are in directories of all nodes. While a node joins or leaves, the nodes disagree
    for a moment about who has which place, and pages are not found. So a rank waits until the group
    has settled, as after the start of an engine, which takes longer.
    """

    distribution = "peercache"
    absent: ClassVar[Mapping[str, str]] = {**ZeroCopyStorage.absent, **NO_CLEAR}
    capabilities = Capabilities(
        retention=Retention.UNTIL_PRESSURE,
        durability=Durability.CRASH,
        shared=True,
        overwrites=False,
        scatter_gather=False,
        max_batch=ZeroCopyStorage.capabilities.max_batch,
    )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(EngineSettings.parse("peercache", config))

    def make_backend(self, config: Any) -> Any:
        module("mem_cache.hicache_storage")
        backend = importlib.import_module("peercache.store").PeerCacheStore(config, None)
        tell_known_nodes(backend.runtime)
        wait_until_settled(backend.config.discovery_addr)
        return backend

    def close(self) -> None:
        """Close the ranks. If there are other clients, wait until they know.

        A closed node sends one more heartbeat, by which it joins again until the group misses it.
        """
        closed = [rank.backend.runtime.discovery for rank in self.ranks()]
        super().close()
        if not self.is_forked_copy:
            for discovery in closed:
                discovery._thread.join(_ANSWER_LIMIT_S)  # noqa: SLF001 - its `stop` does not wait
            if closed:
                wait_until_settled(self._engine.extra_config["discovery_addr"], for_clients=True)

    def sidecar_exists(self, backend: Any, space: KeySpace, keys: Sequence[str]) -> list[bool]:
        names, parts = _object_names(backend, space, keys)
        found: list[Any] = backend._dir_get(names)  # noqa: SLF001 - its v2 interface calls it, too
        there = [location is not None for location in found]
        return [all(there[i : i + parts]) for i in range(0, len(there), parts)]

    def objects_of(self, space: KeySpace, page_hash: str) -> list[tuple[str, int]]:
        """Return the name and the size of each object of a page, for back doors."""
        rank = self.rank(space)
        sizes = rank.pool(space).part_nbytes
        names, parts = _object_names(rank.backend, space, page_keys(space, [page_hash]))
        return list(zip(names, sizes if parts > 1 else [sum(sizes)], strict=True))


def tell_known_nodes(runtime: Any) -> None:
    """Let a node tell others which nodes it knows, once it has done what a change of them asks for.

    `runtime` is the node's `NodeRuntime`.
    """
    known: list[str] = []

    def learn(_: object = None) -> None:
        known[:] = runtime.ring.nodes

    runtime.add_member_listener(learn)
    learn()

    def tell(_: object) -> dict[str, list[str]]:
        return {"nodes": list(known)}

    runtime.control_rpc.register("known_nodes", tell)


def wait_until_settled(address: str, *, for_clients: bool = False) -> None:
    """Return when all nodes of a group know each other, when none answers, or after a while.

    With `for_clients`, return if a storage server is the only node that answers.
    """
    until_s = time.monotonic() + _SETTLE_LIMIT_S
    rpc = importlib.import_module("peercache.rpc").RpcClientPool(_ANSWER_LIMIT_S)
    try:
        while time.monotonic() < until_s:
            try:
                members = rpc.call(address, "members")["members"]
            except OSError:
                return
            known = {one["node_id"]: _known(rpc, one) for one in members}
            clients = [one for one in members if one["role"] != "storage" and known[one["node_id"]]]
            settled = all(nodes == sorted(known) for nodes in known.values())
            if settled or (for_clients and not clients):
                return
            time.sleep(_POLL_S)
    finally:
        rpc.close()


def has_storage(address: str) -> bool:
    """Return True if each storage server of a group knows itself, and there is one.

    Raises:
        OSError: The group does not answer.
    """
    rpc = importlib.import_module("peercache.rpc").RpcClientPool(_ANSWER_LIMIT_S)
    try:
        members = rpc.call(address, "members")["members"]
        servers = [one for one in members if one["role"] == "storage"]
        return bool(servers) and all(one["node_id"] in _known(rpc, one) for one in servers)
    finally:
        rpc.close()


def _known(rpc: Any, member: Mapping[str, Any]) -> list[str]:
    """Return the nodes that a node knows, or none if it has gone or is about to start."""
    address = f"{member['control_host']}:{member['control_port']}"
    try:
        nodes: list[str] = rpc.call(address, "known_nodes")["nodes"]
    except (OSError, RuntimeError):
        return []
    return nodes


def _object_names(backend: Any, space: KeySpace, keys: Sequence[str]) -> tuple[list[str], int]:
    """Return the names of the objects of pages, and how many each page has."""
    transfer = module("mem_cache.hicache_storage").PoolTransfer(
        name=pool_name(space), keys=list(keys)
    )
    names, parts = backend._v2_component_keys(transfer)[:2]  # noqa: SLF001 - there is no public one
    return names, parts
