"""The config of `tiered`."""

from __future__ import annotations

from typing import Literal

from hicache_storage.composition.settings import LimitSettings, Members
from hicache_storage.settings import ByteSize, Field


class TieredSettings(LimitSettings):
    """The config of `tiered`."""

    tiers: Members
    """The stores, the fastest first."""
    write: Literal["through", "back"] = "through"
    """`through`: a set stores a page in every tier before it returns. `back`: it stores the page in the
    first tier, and the other tiers get a copy later."""
    promote: Literal["always", "second_use", "never"] = "second_use"
    """When a page that a lower tier served is copied to the tiers above: at its first read, at its
    second, or never. A page that replaces a damaged one is always copied."""
    copy_nbytes: ByteSize = Field(default=256 << 20, gt=0)
    """The limit for the memory of copies between tiers. Half of it is for copies that nobody waits for:
    if that is full, a page is not copied, and is counted."""
