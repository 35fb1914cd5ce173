"""Stores on several hosts: a Redis Cluster and a Mooncake cluster, each server on a host of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from servers import (
    MooncakeMaster,
    RedisCluster,
    RedisServer,
    ServerProcess,
    cluster_port,
    library_path,
    load_mooncake,
    wait_until,
)

from hicache_storage.registry import open_storage
from storm.hazards import TIMEOUT_S, Isolation, Kill, Pause
from storm.networks import Network
from storm.world import LIMIT_S, World, has_no_client

_DURABLE = ("--appendonly", "yes", "--appendfsync", "always", "--protected-mode", "no")


class _Node(RedisServer):
    """A server of the cluster, on a host of its own."""

    def __init__(self, network: Network, number: int, directory: Path, *options: str) -> None:
        super().__init__(directory, *options, port=cluster_port())
        self.address = network.address_of(number)
        self._network = network
        self._number = number

    def command(self) -> list[str]:
        return self._network.command_on(self._number, super().command())


class StormCluster(RedisCluster):
    """Three masters on different hosts, each with `replicas` on other hosts."""

    def __init__(self, network: Network, directory: Path, replicas: int) -> None:
        super().__init__(directory)
        self.replicas = replicas
        self.nodes: list[RedisServer] = [
            _Node(network, number, directory / str(number), *self.enabled, *_DURABLE)
            for number in range(3 * (1 + replicas))
        ]

    def wait_for_quiet(self) -> None:
        """Wait until all slots are served and, without replicas, until no client is connected."""
        wait_until(self.is_whole if self.replicas else self.is_settled)
        if not self.replicas:
            wait_until(lambda: all(map(has_no_client, self.nodes)))


@contextmanager
def redis_cluster(replicas: int, directory: Path) -> Generator[World]:
    """Yield a cluster from which any one host may be cut off.

    Replicas follow their masters asynchronously, so a failover may undo accepted writes. Without
    replicas nobody takes the place of a master, which keeps its data.
    """
    hosts = 3 * (1 + replicas)
    with Network(hosts) as network, StormCluster(network, directory, replicas) as cluster:
        config = {"url": cluster.url, "timeout_s": TIMEOUT_S}
        yield World(
            open=partial(open_storage, "redis", config),
            hazards=tuple(
                hazard
                for number, node in enumerate(cluster.nodes)
                for hazard in (Kill(node), Pause(node), Isolation(network, number))
            ),
            limit_s=LIMIT_S,
            retains=not replicas,
            keeps_deletions=not replicas,
            settle=cluster.wait_for_quiet,
        )


class _Master(MooncakeMaster):
    """The master, on a host of its own."""

    def __init__(self, network: Network, number: int, directory: Path) -> None:
        super().__init__(directory)
        self.address = network.address_of(number)
        self._network = network
        self._number = number

    def command(self) -> list[str]:
        return self._network.command_on(self._number, super().command())


class _Lender(ServerProcess):
    """A process that lends memory to a Mooncake cluster, on a host of its own."""

    _CODE = """
import json, sys, threading
from hicache_storage import open_storage
with open_storage("mooncake", json.loads(sys.argv[1])):
    print("it lends", flush=True)
    threading.Event().wait()
"""

    def __init__(
        self, network: Network, number: int, directory: Path, master: MooncakeMaster
    ) -> None:
        super().__init__(directory)
        config = master.config(local_hostname=network.address_of(number))
        code = [sys.executable, "-c", self._CODE, json.dumps(config)]
        self._command = network.command_on(number, code)
        self._starts = 0

    def start(self) -> None:
        self._starts += 1
        super().start()

    def command(self) -> list[str]:
        return self._command

    def environment(self) -> Mapping[str, str]:
        return library_path()

    def answers(self) -> bool:
        return self.log.read_bytes().count(b"it lends") == self._starts


@contextmanager
def mooncake(directory: Path) -> Generator[World]:
    """Yield a master and a lender of memory, on two hosts.

    Pages are lost with the memory of the lender, and the list of pages with the master.
    """
    load_mooncake()
    os.environ.setdefault("GLOG_minloglevel", "3")  # a line for each page that fails
    with Network(2) as network, _Master(network, 0, directory / "master") as master:
        lender = _Lender(network, 1, directory / "lender", master)
        with lender:
            config = master.config(
                local_hostname=network.address, global_segment_size=0, timeout_s=TIMEOUT_S
            )
            yield World(
                open=partial(open_storage, "mooncake", config),
                hazards=tuple(
                    hazard
                    for number, server in enumerate((master, lender))
                    for hazard in (Kill(server), Pause(server), Isolation(network, number))
                ),
                limit_s=LIMIT_S,
                retains=False,
                keeps_deletions=False,
                late_threads=os.cpu_count() or 1,  # asio's resolvers, one for each io_context
            )
