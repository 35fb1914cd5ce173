"""LMCache's `fs` (Python, asyncio) and `fs_native` (C++): one file per page in one flat directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from field.lmcache.engine import (
    LMCacheSettings,
    LMCacheStorage,
    file_name,
)
from hicache_storage.storage import Capabilities, Durability, Retention

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.keys import KeySpace


class LMCacheFilesSettings(LMCacheSettings):
    """Settings of the engine and the adapter, and where the files lie."""

    path: str
    """`base_path` of the adapter's config."""


class LMCacheFiles(LMCacheStorage):
    """The base of both file adapters."""

    kind: ClassVar[str]

    def __init__(self, settings: LMCacheFilesSettings) -> None:
        super().__init__(settings, self.kind, {"base_path": settings.path})
        self._directory = Path(settings.path)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(LMCacheFilesSettings.parse(f"lmcache_{cls.kind}", config))

    def path_of(self, space: KeySpace, page_hash: str) -> Path:
        """Return the file of a page, for back doors."""
        (key,) = self.object_keys(space, [page_hash])
        return self._directory / file_name(key)


class LMCacheFs(LMCacheFiles):
    """LMCache's `lmcache.v1.distributed.l2_adapters.fs_l2_adapter.FSL2Adapter`."""

    kind = "fs"
    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.CRASH,
        shared=True,
        overwrites=False,
        scatter_gather=False,
        parallelism=2,
    )


class LMCacheFsNative(LMCacheFiles):
    """LMCache's `LMCacheFSClient` in a `NativeConnectorL2Adapter`, with four threads by default."""

    kind = "fs_native"
    capabilities = replace(LMCacheFs.capabilities, parallelism=4)
