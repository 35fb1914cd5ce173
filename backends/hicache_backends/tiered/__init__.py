"""`tiered`: fast stores above large ones, as one store."""

from __future__ import annotations

from hicache_backends.tiered.settings import TieredSettings
from hicache_backends.tiered.storage import TieredStorage

__all__ = ["TieredSettings", "TieredStorage"]
