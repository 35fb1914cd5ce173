"""`s3`: one object per page, in AWS's S3 or any store with the same protocol."""

from __future__ import annotations

from hicache_backends.s3.settings import S3Settings
from hicache_backends.s3.storage import S3Storage

__all__ = ["S3Settings", "S3Storage"]
