"""The config of `memory`."""

from __future__ import annotations

from hicache_storage.settings import ByteSize, Field, PositiveSeconds, Settings


class MemorySettings(Settings):
    """The config of `memory`."""

    capacity_nbytes: ByteSize | None = Field(default=None, gt=0)
    """The limit for payload and frame bytes. A set that would exceed it is refused. None: no limit."""
    timeout_s: PositiveSeconds = 30.0
    """Has no effect, because no call of this backend can take long. Every backend has this field."""
