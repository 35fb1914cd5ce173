"""`redis`: one string per page in Redis or Valkey: one server, sentinels or a cluster."""

from __future__ import annotations

from hicache_backends.redis.settings import RedisSettings
from hicache_backends.redis.storage import RedisStorage

__all__ = ["RedisSettings", "RedisStorage"]
