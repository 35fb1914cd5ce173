"""`encrypted`: wraps another backend and seals its pages, page names and key spaces with AES-256."""

from __future__ import annotations

from hicache_backends.encrypted.settings import EncryptedSettings
from hicache_backends.encrypted.storage import EncryptedStorage

__all__ = ["EncryptedSettings", "EncryptedStorage"]
