"""The cache controller: it moves pages between host memory (L2) and storage (L3).

Start with `CacheController`. `docs/controller.md` explains the flow of a request.
"""

from __future__ import annotations

from hicache_storage.controller.cache import HostCache
from hicache_storage.controller.controller import CacheController
from hicache_storage.controller.explain import Explanation
from hicache_storage.controller.lease import Lease, Reservation
from hicache_storage.controller.pool_coverage import Coverage
from hicache_storage.controller.pools import CachePool
from hicache_storage.controller.prefetch import Prefetch
from hicache_storage.controller.ranks import Channel, Ranks, RanksLost, SingleRank
from hicache_storage.controller.torch_consensus import TorchRanks
from hicache_storage.controller_settings import (
    ControllerSettings,
    DropPolicy,
    PartialHits,
    WritePolicy,
)
from hicache_storage.prefetch_policy import PrefetchPolicy
from hicache_storage.request_log.reasons import Reason

__all__ = [
    "CacheController",
    "CachePool",
    "Channel",
    "ControllerSettings",
    "Coverage",
    "DropPolicy",
    "Explanation",
    "HostCache",
    "Lease",
    "PartialHits",
    "Prefetch",
    "PrefetchPolicy",
    "Ranks",
    "RanksLost",
    "Reason",
    "Reservation",
    "SingleRank",
    "TorchRanks",
    "WritePolicy",
]
