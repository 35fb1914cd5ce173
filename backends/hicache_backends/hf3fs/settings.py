"""The config of `hf3fs`."""

from __future__ import annotations

import re
from typing import Self

from pydantic import model_validator

from hicache_storage.settings import (
    ByteSize,
    DirectoryName,
    Field,
    PositiveSeconds,
    Seconds,
    SecretStr,
    Settings,
)

SQLITE = "sqlite"
DEFAULT_PARALLELISM = 4
_INDEX = re.compile(rf"{SQLITE}\Z|(redis|rediss|unix)://")


class Hf3fsSettings(Settings):
    """The config of `hf3fs`."""

    path: DirectoryName
    """The directory on the mount. It is made if it is missing.

    Everyone who uses the directory shares its pages.
    """
    index: SecretStr = SecretStr(SQLITE)
    """The index of pages and slots: "sqlite" (a file under `path`) for one host, or the URL of a
    Redis server for any number of hosts.
    """
    capacity_nbytes: ByteSize | None = Field(default=None, gt=0)
    """The limit for the slots in use, all key spaces together. None: no limit."""
    high_watermark: float = Field(default=0.95, gt=0, le=1)
    """The share of the capacity at which eviction begins, least recently used pages first."""
    low_watermark: float = Field(default=0.9, gt=0, le=1)
    """The share of the capacity at which eviction ends."""
    direct: bool | None = None
    """Read and write around the page cache, if pages, memory and file system allow it.

    None: yes, unless the file system is known to belong to this machine alone.
    """
    usrbio: bool | None = None
    """Bypass FUSE with 3FS's own client. None: if the client is installed and `path` is on 3FS."""
    parallelism: int = Field(default=DEFAULT_PARALLELISM, ge=1)
    """Concurrent calls of the page store in each direction."""
    touch_interval_s: Seconds = Field(default=1.0, ge=0)
    """The longest delay until the index receives the access times of pages that were read."""
    timeout_s: PositiveSeconds = 30.0
    """The time limit of a call, including waits for the index.

    Afterwards a get counts the pages that it has not begun as misses, and a set refuses them.
    """

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.low_watermark > self.high_watermark:
            raise ValueError("low_watermark: must not be above high_watermark")
        if not _INDEX.match(self.index.get_secret_value()):
            raise ValueError('index: must be "sqlite" or the URL of a Redis server')
        return self
