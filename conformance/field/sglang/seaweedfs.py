"""SGLang's `SeaweedFSStore`: one object per page in a bucket, over S3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from field.adapter import results_from_prefix_counts
from field.sglang.engine import KV, EngineSettings, module, page_key
from field.sglang.zero_copy import ZeroCopyStorage, pool_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.keys import KeySpace


class SGLangSeaweedFS(ZeroCopyStorage):
    """SGLang's `sglang.srt.mem_cache.storage.seaweedfs.seaweedfs_store.SeaweedFSStore`.

    `extra_config` holds the store's fields: `endpoint`, `bucket`, `prefix`, `access_key`, ...
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(EngineSettings.parse("sglang_seaweedfs", config))

    def make_backend(self, config: Any) -> Any:
        return module("mem_cache.storage.seaweedfs.seaweedfs_store").SeaweedFSStore(config)

    def sidecar_exists(self, backend: Any, space: KeySpace, keys: Sequence[str]) -> list[bool]:
        name = pool_name(space)
        names = [backend._component_key(key, name) for key in keys]  # noqa: SLF001 - its v2 interface calls it, too
        return results_from_prefix_counts(backend.batch_exists, names)

    def clear(self, space: KeySpace) -> int:
        """Call the backend's `clear` at this rank. Count the removed pages by two listings."""
        backend = self.rank(space).backend
        before = _objects(backend)
        backend.clear()
        return before - _objects(backend)

    def object_of(self, space: KeySpace, page_hash: str) -> str:
        """Return the name of a page's object, for back doors."""
        backend, key = self.rank(space).backend, page_key(space, page_hash)
        if space.pool != KV:
            key = backend._component_key(key, pool_name(space))  # noqa: SLF001 - there is no public method
        name: str = backend._object_key(key)  # noqa: SLF001
        return name


def _objects(backend: Any) -> int:
    """Return how many objects are in the bucket under the prefix of the config."""
    client, config = backend._s3, backend.config  # noqa: SLF001 - a client for the same bucket
    pages = client.get_paginator("list_objects_v2")
    found = pages.paginate(Bucket=config.bucket, Prefix=config.prefix)
    return sum(len(page.get("Contents", [])) for page in found)
