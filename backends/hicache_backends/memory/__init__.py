"""`memory`: pages in a dict, the plain reference with which other backends are compared."""

from __future__ import annotations

from hicache_backends.memory.settings import MemorySettings
from hicache_backends.memory.storage import MemoryStorage

__all__ = ["MemorySettings", "MemoryStorage"]
