"""`hf3fs`: pages in fixed slots of large preallocated files on a shared mount, the way 3FS is used."""

from __future__ import annotations

from hicache_backends.hf3fs.settings import Hf3fsSettings
from hicache_backends.hf3fs.storage import Hf3fsStorage

__all__ = ["Hf3fsSettings", "Hf3fsStorage"]
