"""`fsspec`: pages as files of any filesystem that fsspec has, with the guarantees of this filesystem."""

from __future__ import annotations

from hicache_backends.fsspec.settings import FsspecSettings
from hicache_backends.fsspec.storage import FsspecStorage

__all__ = ["FsspecSettings", "FsspecStorage"]
