"""A storm judges a cluster only when no node is about to refuse calls."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers import awaited_by, wait_until
from storm.clusters import StormCluster
from storm.networks import Network

pytestmark = [pytest.mark.no_cover, pytest.mark.slow]


def test_a_cluster_is_not_quiet_before_its_pings_are_answered(tmp_path: Path) -> None:
    with Network(3) as network, StormCluster(network, tmp_path, replicas=0) as cluster:
        cluster.wait_for_quiet()
        all_nodes = cluster.nodes
        cluster.nodes, (lost,) = all_nodes[:2], all_nodes[2:]
        network.cut(2)
        wait_until(lambda: lost.address in awaited_by(cluster.nodes[0]))

        assert (True, False) == (cluster.is_whole(), cluster.is_settled())

        network.heal(2)
        cluster.nodes = all_nodes
        cluster.wait_for_quiet()
