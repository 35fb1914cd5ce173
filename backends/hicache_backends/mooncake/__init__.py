"""`mooncake`: pages as objects in a Mooncake Store, moved by Mooncake's own client without a copy.

Importing this package or its settings does not load the native client. `MooncakeStorage` loads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_backends.mooncake.settings import MooncakeSettings

if TYPE_CHECKING:
    from hicache_backends.mooncake.storage import MooncakeStorage

__all__ = ["MooncakeSettings", "MooncakeStorage"]


def __getattr__(name: str) -> object:
    """Import `MooncakeStorage`, and with it the native client, on first use."""
    if name != "MooncakeStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hicache_backends.mooncake.storage import MooncakeStorage  # noqa: PLC0415

    return MooncakeStorage
