"""LMCache's `s3` adapter: Python on asyncio over the AWS CRT, with one object per page in a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from field.lmcache.engine import LMCacheSettings, LMCacheStorage, s3_object
from hicache_storage.storage import Capabilities, Durability, Retention

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.keys import KeySpace


class LMCacheS3Settings(LMCacheSettings):
    """Settings of the engine and the adapter, the address of the bucket and a pair of keys."""

    endpoint: str
    """`s3_endpoint` of the adapter's config: BUCKET.HOST:PORT, over plain HTTP."""
    access_key: str
    secret_key: str


class LMCacheS3(LMCacheStorage):
    """LMCache's `lmcache.v1.distributed.l2_adapters.s3_l2_adapter.S3L2Adapter`."""

    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.CRASH,
        shared=True,
        scatter_gather=False,
        parallelism=2,
    )

    def __init__(self, settings: LMCacheS3Settings) -> None:
        fields = {
            "s3_endpoint": settings.endpoint,
            "s3_region": "us-east-1",
            "disable_tls": True,
            "aws_access_key_id": settings.access_key,
            "aws_secret_access_key": settings.secret_key,
        }
        super().__init__(settings, "s3", fields)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(LMCacheS3Settings.parse("lmcache_s3", config))

    def object_of(self, space: KeySpace, page_hash: str) -> str:
        """Return the name of a page's object, for back doors."""
        (key,) = self.object_keys(space, [page_hash])
        return s3_object(key)
