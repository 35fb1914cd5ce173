"""The layer between engines and storages. Open a `PageStore` to store and load pages of an engine.

A page store adds frames, prefix lookups, deadlines and verdicts to a storage.
"""

from __future__ import annotations

from hicache_storage.page_store.lookup import HitPolicy, PoolSpec
from hicache_storage.page_store.observer import Observer
from hicache_storage.page_store.results import Match, Outcome, Transfer, Verdict
from hicache_storage.page_store.settings import PageStoreSettings
from hicache_storage.page_store.store import PageStore

__all__ = [
    "HitPolicy",
    "Match",
    "Observer",
    "Outcome",
    "PageStore",
    "PageStoreSettings",
    "PoolSpec",
    "Transfer",
    "Verdict",
]
