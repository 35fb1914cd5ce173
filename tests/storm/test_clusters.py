"""A storm judges a cluster only when no node is about to refuse calls."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers import wait_until, waits_for_a_pong
from storm.clusters import StormCluster
from storm.networks import Network

pytestmark = [pytest.mark.no_cover, pytest.mark.slow]


def test_a_cluster_is_not_quiet_before_its_pings_are_answered(tmp_path: Path) -> None:
    with Network(3) as network, StormCluster(network, tmp_path, replicas=0) as cluster:
        cluster.wait_for_quiet()
        network.cut(2)
        wait_until(lambda: waits_for_a_pong(cluster.nodes[0]))
        network.heal(2)

        assert (True, False) == (cluster.is_whole(), cluster.is_settled())

        cluster.wait_for_quiet()
        assert cluster.is_settled()
