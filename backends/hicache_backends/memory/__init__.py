"""`memory`: pages in a dict, the simple reference that other backends are compared with."""

from __future__ import annotations

from hicache_backends.memory.settings import MemorySettings
from hicache_backends.memory.storage import MemoryStorage

__all__ = ["MemorySettings", "MemoryStorage"]
