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

# More threads than processors only wait for each other, because most of a cached read is a copy.
DEFAULT_PARALLELISM = min(4, os.cpu_count() or 1)


class FileSettings(Settings):
    """The config of `file`."""

    path: DirectoryName
    """The directory. It is made if it is missing. Everyone who uses the directory shares its pages."""
    capacity_nbytes: ByteSize | None = Field(default=None, gt=TRAILER_NBYTES)
    """The limit for all page files together. The least recently used pages are evicted first.

    None: no limit.
    """
    min_free_nbytes: ByteSize = Field(default=0, ge=0)
    """The space that must stay free on the file system."""
    durability: Literal["crash", "power"] = "crash"
    """"power": bytes and names are on disk before a set returns True."""
    recycle: bool = True
    """Overwrite evicted files in place, if that is safe, instead of unlinking them."""
    parallelism: int = Field(default=DEFAULT_PARALLELISM, ge=1)
    """Concurrent calls of the page store in each direction: 4, or fewer on fewer processors."""
    touch_interval_s: Seconds = Field(default=0.0, ge=0)
    """How old the time of a page's last use must be before a get updates it.

    0: every get updates it, which is exact LRU.
    """
    timeout_s: PositiveSeconds = 30.0
    """The time limit of a call.

    Afterwards a get counts the pages that it has not begun as misses, a set refuses them, and
    `exists` and `delete` raise StorageTimeout.
    """
