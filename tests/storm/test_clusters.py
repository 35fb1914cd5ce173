"""A storm judges a cluster only when no node is about to refuse calls."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from storm.clusters import StormCluster
from storm.networks import Network

pytestmark = [pytest.mark.no_cover, pytest.mark.slow]
_UNTIL_PINGS_ARE_DUE_S = 1.7
"""A node pings each other one after half of the node time-out of two seconds."""


def test_a_node_that_was_cut_off_is_not_quiet_before_its_pings_are_answered(tmp_path: Path) -> None:
    with Network(3) as network, StormCluster(network, tmp_path, replicas=0) as cluster:
        cluster.wait_for_quiet()
        network.cut(2)
        time.sleep(_UNTIL_PINGS_ARE_DUE_S)
        network.heal(2)

        assert (True, False) == (cluster.is_whole(), cluster.is_settled())

        cluster.wait_for_quiet()
        assert cluster.is_settled()
