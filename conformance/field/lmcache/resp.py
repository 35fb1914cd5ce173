"""LMCache's `resp` adapter: a C++ client of Redis, with one key per page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from field.lmcache.engine import (
    LMCacheSettings,
    LMCacheStorage,
    redis_key,
)
from hicache_storage.storage import Capabilities, Durability, Retention

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.keys import KeySpace


class LMCacheRespSettings(LMCacheSettings):
    """Settings of the engine and the adapter, and the address of the Redis server."""

    host: str
    port: int


class LMCacheResp(LMCacheStorage):
    """LMCache's `LMCacheRedisClient` in a `NativeConnectorL2Adapter`, with eight threads by default."""

    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.CRASH,
        shared=True,
        scatter_gather=False,
        parallelism=8,
    )

    def __init__(self, settings: LMCacheRespSettings) -> None:
        super().__init__(settings, "resp", {"host": settings.host, "port": settings.port})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(LMCacheRespSettings.parse("lmcache_resp", config))

    def key_of(self, space: KeySpace, page_hash: str) -> str:
        """Return the key of a page in the server, for back doors."""
        (key,) = self.object_keys(space, [page_hash])
        return redis_key(key)
