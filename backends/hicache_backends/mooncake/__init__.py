"""`mooncake`: pages as objects of a Mooncake Store, moved by its own client without a copy."""

from __future__ import annotations

from hicache_backends.mooncake.settings import MooncakeSettings
from hicache_backends.mooncake.storage import MooncakeStorage

__all__ = ["MooncakeSettings", "MooncakeStorage"]
