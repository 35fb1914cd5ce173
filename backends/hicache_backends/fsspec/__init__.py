"""`fsspec`: pages as files in any filesystem that fsspec supports, with its guarantees."""

from __future__ import annotations

from hicache_backends.fsspec.settings import FsspecSettings
from hicache_backends.fsspec.storage import FsspecStorage

__all__ = ["FsspecSettings", "FsspecStorage"]
