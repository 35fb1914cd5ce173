"""The config of `memory`."""

from __future__ import annotations

from hicache_storage.settings import ByteSize, Field, PositiveSeconds, Settings


class MemorySettings(Settings):
    """The config of `memory`."""

    capacity_nbytes: ByteSize | None = Field(default=None, gt=0)
    """The limit of payload and frame bytes. A set beyond it is refused. None: all memory there is."""
    timeout_s: PositiveSeconds = 30.0
    """A field that every backend has. No call of this backend can take long."""
