"""`file`: one file per page, in a directory that any number of processes share."""

from __future__ import annotations

from hicache_backends.file.settings import FileSettings
from hicache_backends.file.storage import FileStorage

__all__ = ["FileSettings", "FileStorage"]
