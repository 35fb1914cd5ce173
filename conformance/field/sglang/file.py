"""SGLang's `HiCacheFile`: one file per page in one flat directory.

KV pages take the path of `_generic_page_get` and `_generic_page_set` of the cache controller: a get
reads each page into a fresh flat tensor, and a set has one result per batch. Pages of other pools
are read and written one by one under `hash.pool`, as in `batch_get_v2` and `batch_set_v2`. The
adapter deletes a page as the evictor does.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from field.adapter import (
    EQUAL_PARTS_ONLY,
    NO_CHECKSUM,
    NO_CONFIG_CHECK,
    NO_LISTING,
    NO_READ_ONLY,
    ONE_RESULT_A_BATCH,
    results_from_batch_flag,
    results_from_prefix_counts,
)
from field.sglang.engine import (
    BATCH_PAGES,
    KV,
    EngineSettings,
    SGLangStorage,
    module,
    pool_keys,
)
from hicache_storage.settings import ByteSize, Field
from hicache_storage.storage import Capabilities, Durability, Retention

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


class SGLangFileSettings(EngineSettings):
    """Settings of the engine and the backend, and where the files lie."""

    path: str
    """`file_storage_path` of the backend's config."""
    capacity_nbytes: ByteSize | None = Field(default=None, gt=0)
    """`max_size` of the backend's config, for its evictor."""
    strided: bool = False
    """True: read into tensors that are not contiguous, which the engine never does."""


class SGLangFile(SGLangStorage):
    """SGLang's `sglang.srt.mem_cache.hicache_storage.HiCacheFile`."""

    absent: ClassVar[Mapping[str, str]] = {
        **NO_CONFIG_CHECK,
        **NO_CHECKSUM,
        **NO_LISTING,
        **NO_READ_ONLY,
        **ONE_RESULT_A_BATCH,
        **EQUAL_PARTS_ONLY,
    }
    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.CRASH,
        shared=True,
        overwrites=False,
        scatter_gather=False,
        max_batch=BATCH_PAGES,
    )

    def __init__(self, settings: SGLangFileSettings) -> None:
        if settings.capacity_nbytes is not None:
            extra = {**settings.extra_config, "max_size": settings.capacity_nbytes}
            settings = settings.model_copy(update={"extra_config": extra})
        super().__init__(settings)
        self._directory, self._step = settings.path, 1 + settings.strided
        if "max_size" in settings.extra_config:
            self.narrow(retention=Retention.UNTIL_PRESSURE)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(SGLangFileSettings.parse("sglang_file", config))

    def make_backend(self, config: Any) -> Any:
        os.environ.pop(
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", None
        )  # it takes precedence over the config
        return module("mem_cache.hicache_storage").HiCacheFile(config, self._directory)

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        rank = self.rank(space)
        return results_from_prefix_counts(rank.batch_exists, pool_keys(space, hashes))

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        rank = self.rank(space)
        fresh = [
            _torch().zeros(page.nbytes * self._step, dtype=_torch().uint8)[:: self._step]
            for page in pages
        ]
        found = rank.batch_get(pool_keys(space, hashes), fresh)
        for page, data in zip(pages, found, strict=True):
            if data is not None:
                page.copy_from(data.contiguous().numpy())
        return [data is not None for data in found]

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        rank = self.rank(space)
        keys, values = pool_keys(space, hashes), [_tensor(page) for page in pages]
        if space.pool == KV:
            return results_from_batch_flag(rank.batch_set(keys, values), len(keys))
        return [rank.set(key, value) for key, value in zip(keys, values, strict=True)]

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Delete files as the evictor does, because the backend has no delete that takes a key."""
        rank = self.rank(space)
        for page_hash in hashes:
            path = self.path_of(space, page_hash)
            if path.exists():
                path.unlink(missing_ok=True)
            if rank.metadata_cache is not None:
                rank.metadata_cache.remove(path.stem)
        return [True] * len(hashes)

    def clear(self, space: KeySpace) -> int:
        """Call the backend's `clear` at this rank.

        Return how many files disappeared.
        """
        rank = self.rank(space)
        before = self._files()
        rank.clear()
        return before - self._files()

    def path_of(self, space: KeySpace, page_hash: str) -> Path:
        """Return the file of a page, as the backend names it, for back doors."""
        (key,) = pool_keys(space, [page_hash])
        name = self.rank(space)._get_suffixed_key(key)  # noqa: SLF001 - there is no public method
        return Path(self._directory, f"{name}.bin")

    def _files(self) -> int:
        return sum(entry.is_file() for entry in Path(self._directory).iterdir())


def _tensor(page: Page) -> Any:
    """Return a page as a flat tensor over its memory, or over a copy if the memory is read-only."""
    (segment,) = page.segments
    memory = bytearray(segment) if segment.readonly else segment
    return _torch().frombuffer(memory, dtype=_torch().uint8)


def _torch() -> Any:
    return importlib.import_module("torch")
