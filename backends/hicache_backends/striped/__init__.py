"""`striped`: many disks, or many servers, as one store."""

from __future__ import annotations

from hicache_backends.striped.settings import StripedSettings
from hicache_backends.striped.storage import StripedStorage

__all__ = ["StripedSettings", "StripedStorage"]
