"""`fsspec`: pages as files of any filesystem that fsspec has, with the guarantees that this one has."""

from __future__ import annotations

from hicache_backends.fsspec.storage import FsspecSettings, FsspecStorage

__all__ = ["FsspecSettings", "FsspecStorage"]
