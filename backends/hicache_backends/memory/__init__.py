"""`memory`: pages in a dict. The reference that other backends are compared with: obviously right."""

from __future__ import annotations

from hicache_backends.memory.storage import MemorySettings, MemoryStorage

__all__ = ["MemorySettings", "MemoryStorage"]
