"""`file`: one file a page under a directory that any number of processes share."""

from __future__ import annotations

from hicache_backends.file.storage import FileSettings, FileStorage

__all__ = ["FileSettings", "FileStorage"]
