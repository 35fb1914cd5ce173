"""SGLang's `HiCacheNixl` over files: one file per buffer of a page, written by NIXL's POSIX plugin."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from field.adapter import NO_DELETE
from field.sglang.engine import KV, EngineSettings, module, page_key, replace_classes
from field.sglang.host_pool import HostPool
from field.sglang.zero_copy import Rank, ZeroCopyStorage, pool_name
from hicache_storage.storage import Retention

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.keys import KeySpace

_UNUSED_CLASSES = {"mem_cache.pool_host": {"HostKVCache": HostPool}}


class SGLangNixlSettings(EngineSettings):
    """Settings of the engine and the backend, and where the files lie."""

    path: str
    """The directory, which replaces `SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR`."""


class SGLangNixl(ZeroCopyStorage):
    """SGLang's `sglang.srt.mem_cache.storage.nixl.hicache_nixl.HiCacheNixl`."""

    absent: ClassVar[Mapping[str, str]] = {
        operation: why
        for operation, why in ZeroCopyStorage.absent.items()
        if operation not in NO_DELETE
    }

    def __init__(self, settings: SGLangNixlSettings) -> None:
        super().__init__(settings)
        self._directory = settings.path
        if settings.extra_config.get("l3_cleaner_enabled", True):
            self.narrow(retention=Retention.UNTIL_PRESSURE)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(SGLangNixlSettings.parse("sglang_nixl", config))

    def make_backend(self, config: Any) -> Any:
        os.environ.pop(
            "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", None
        )  # the variable takes precedence over the argument
        replace_classes(_UNUSED_CLASSES)
        return module("mem_cache.storage.nixl.hicache_nixl").HiCacheNixl(config, self._directory)

    def sidecar_exists(self, backend: Any, space: KeySpace, keys: Sequence[str]) -> list[bool]:
        names, buffers = _sidecar_names(backend, space, keys)
        found: list[bool] = backend._query_keys_exist(names)  # noqa: SLF001 - its v2 interface calls it, too
        return [all(found[i : i + buffers]) for i in range(0, len(found), buffers)]

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Delete the pages' files as the cleaner does: the backend has no delete that takes a key."""
        unlink = module("mem_cache.storage.nixl.nixl_cleaner")._safe_unlink  # noqa: SLF001
        paths = [path for each in hashes for path, _ in self.paths_of(space, each)]
        for path in paths:
            unlink(str(path))
        return [True] * len(hashes)

    def clear(self, space: KeySpace) -> int:
        """Call the backend's `clear` at this rank.

        Return how many files disappeared.
        """
        rank = self.rank(space)
        before = self._files()
        rank.backend.clear()
        return (before - self._files()) // _buffers(rank, space)

    def paths_of(self, space: KeySpace, page_hash: str) -> list[tuple[Path, int]]:
        """Return the path and the size of each file of a page, for back doors."""
        rank, key = self.rank(space), page_key(space, page_hash)
        backend = rank.backend
        names = (
            _names(backend, key) if space.pool == KV else _sidecar_names(backend, space, [key])[0]
        )
        paths = [Path(backend.file_manager.get_file_path(name)) for name in names]
        return list(zip(paths, rank.pool(space).part_nbytes, strict=True))

    def _files(self) -> int:
        return sum(path.is_file() for path in Path(self._directory).rglob("*"))


def _buffers(rank: Rank, space: KeySpace) -> int:
    """Return how many files a page has."""
    return len(rank.pool(space).part_nbytes)


def _names(backend: Any, key: str) -> list[str]:
    """Return the names of a KV page's files."""
    if backend.is_zero_copy:
        names: list[str] = backend._get_key_list_from_meta([key])  # noqa: SLF001 - it has no public one
        return names
    return [backend._get_suffixed_key(key)]  # noqa: SLF001


def _sidecar_names(backend: Any, space: KeySpace, keys: Sequence[str]) -> tuple[list[str], int]:
    """Return the names of the files of pages outside the KV pool, and how many each page has."""
    name = pool_name(space)
    context = backend._hybrid_pool_ctx[name]  # noqa: SLF001 - it has no public one
    buffers = backend._get_hybrid_key_multiplier(name, context.host_pool)  # noqa: SLF001
    if not context.is_zero_copy:
        buffers = 1
    names = backend._get_hybrid_component_keys(list(keys), name, buffers)  # noqa: SLF001
    return names, buffers
