"""The layer between engines and storages: frames, proofs, lookups, deadlines and verdicts."""

from __future__ import annotations

from hicache_storage.page_store.frame import FramedPage
from hicache_storage.page_store.hit_policy import HitPolicy, PoolSpec
from hicache_storage.page_store.results import Match, Outcome, Transfer, Verdict
from hicache_storage.page_store.store import PageStore, PageStoreSettings

__all__ = [
    "FramedPage",
    "HitPolicy",
    "Match",
    "Outcome",
    "PageStore",
    "PageStoreSettings",
    "PoolSpec",
    "Transfer",
    "Verdict",
]
