"""`encrypted`: another backend, whose pages, page names and key spaces are sealed with AES-256."""

from __future__ import annotations

from hicache_backends.encrypted.settings import EncryptedSettings
from hicache_backends.encrypted.storage import EncryptedStorage

__all__ = ["EncryptedSettings", "EncryptedStorage"]
