"""The config of `file`."""

from __future__ import annotations

import os
from typing import Literal

from hicache_backends.file.page_file import TRAILER_NBYTES
from hicache_storage.settings import (
    ByteSize,
    DirectoryName,
    Field,
    PositiveSeconds,
    Seconds,
    Settings,
)

# Threads beyond the processors only wait for each other: most of a cached read is a copy.
DEFAULT_PARALLELISM = min(4, os.cpu_count() or 1)


class FileSettings(Settings):
    """The config of `file`."""

    path: DirectoryName
    """The directory, which is made if it is missing. All that use the directory share its pages."""
    capacity_nbytes: ByteSize | None = Field(default=None, gt=TRAILER_NBYTES)
    """The limit of all page files together. The least recently used go first. None: no limit."""
    min_free_nbytes: ByteSize = Field(default=0, ge=0)
    """The space that the pages leave free on the file system."""
    durability: Literal["crash", "power"] = "crash"
    """"power": bytes and names are on the disk before a set returns True."""
    recycle: bool = True
    """Overwrite evicted files in place, where that is safe, instead of unlinking them."""
    parallelism: int = Field(default=DEFAULT_PARALLELISM, ge=1)
    """Concurrent calls that the page store makes in each direction; 4, or fewer on fewer processors."""
    touch_interval_s: Seconds = Field(default=0.0, ge=0)
    """The age from which a get renews a page's recency. 0: every get does, which is exact LRU."""
    timeout_s: PositiveSeconds = 30.0
    """The limit of a call. Pages not begun by then are misses, or refused; exists and delete raise
    StorageTimeout."""
