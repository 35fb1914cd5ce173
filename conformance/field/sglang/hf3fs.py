"""SGLang's `HiCacheHF3FS` over SGLang's mock client: slots in a plain file, metadata in the process.

KV pages go through `batch_get_v1` and `batch_set_v1`, pages of other pools through `batch_get_v2`
and `batch_set_v2`, to and from a host pool that holds the pages of the call. The layout
"page_first" takes its zero-copy path, with K and V of an MHA page in a slot each. Other layouts
take its path over flat pages, and so does a page without halves.

An engine has one model, dtype, layout, revision and page size. A key space that differs in one of
these stands for another server of the same configuration, with its own metadata. Servers share one
file per page size, because the backend's documentation advises against different slots in one file.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import threading
import types
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from field.adapter import (
    NO_CHECKSUM,
    NO_CONFIG_CHECK,
    NO_LISTING,
    NO_READ_ONLY,
    ONE_RESULT_A_BATCH,
    AdaptedStorage,
    results_from_batch_flag,
    results_from_prefix_counts,
)
from field.sglang.engine import (
    BATCH_PAGES,
    KV,
    EngineSettings,
    module,
    page_keys,
    replace_classes,
    storage_config,
)
from hicache_storage.errors import UnsupportedOperation
from hicache_storage.settings import ByteSize, Field
from hicache_storage.storage import Capabilities, Retention

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

_PACKAGE = "mem_cache.storage.hf3fs"
_UNUSED_CLASSES = {
    "mem_cache.pool_host": {"HostKVCache": type("HostKVCache", (), {})},
    "observability.metrics_collector": {"StorageMetrics": type("StorageMetrics", (), {})},
}
_CONFIG_PATH = "SGLANG_HICACHE_HF3FS_CONFIG_PATH"
_STARTING = threading.Lock()
"""Held while a backend starts, because it reads its config from an environment variable."""


class SGLangHF3FSSettings(EngineSettings):
    """Settings of the engine, and the values of the backend's config file, for every server."""

    path: str
    """The directory of `file_path_prefix`."""
    slots: int = Field(default=12_000, ge=1)
    """How many slots there are, for one page each. `file_size` is this number times the slot size."""
    capacity_nbytes: ByteSize | None = Field(default=None, gt=0)
    """`file_size`, in place of `slots`."""
    numjobs: int = Field(default=4, ge=1)
    entries: int = Field(default=8, ge=1)
    page_flags: bool = False
    """True: return the flags of a set for each page. The engine returns `all` of them."""


class SGLangHF3FS(AdaptedStorage):
    """SGLang's `sglang.srt.mem_cache.storage.hf3fs.storage_hf3fs.HiCacheHF3FS`.

    Its client is `Hf3fsMockClient`.
    """

    distribution = "sglang"
    absent: ClassVar[Mapping[str, str]] = {
        **NO_CONFIG_CHECK,
        **NO_CHECKSUM,
        **NO_LISTING,
        **NO_READ_ONLY,
        **ONE_RESULT_A_BATCH,
        "open_space": "its engine cuts layers and heads into equal parts, and without a metadata server"
        " it refuses MLA models",
    }
    capabilities = Capabilities(
        retention=Retention.UNTIL_PRESSURE,
        overwrites=False,
        scatter_gather=False,
        max_batch=BATCH_PAGES,
    )

    def __init__(self, settings: SGLangHF3FSSettings) -> None:
        self._settings = settings
        self._servers: dict[tuple[Any, ...], _Rank] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(SGLangHF3FSSettings.parse("sglang_hf3fs", config))

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self._rank(space)

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self._rank(space).exists(page_keys(space, hashes))

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        return self._rank(space).get(page_keys(space, hashes), pages)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        flags = self._rank(space).set(page_keys(space, hashes), pages)
        if self._settings.page_flags or space.pool != KV:
            return flags
        return results_from_batch_flag(all(flags), len(hashes))

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self._rank(space).delete(page_keys(space, hashes))
        return [True] * len(hashes)

    def clear(self, space: KeySpace) -> int:
        """Call the backend's `clear` at this rank. Return how many keys disappeared."""
        return self._rank(space).clear()

    def close(self) -> None:
        if not self._closed:
            super().close()
            for server in () if self.is_forked_copy else self._servers.values():
                server.backend.close()

    def _rank(self, space: KeySpace) -> _Rank:
        self.ensure_open()
        server = (space.model, space.dtype, space.layout, space.revision, space.page_tokens)
        place = (*server, space.shard, space.stored_nbytes, space.pool)
        with self._lock:
            if place not in self._servers:
                self._servers[place] = _Rank(space, self._settings)
            return self._servers[place]


class _Rank:
    """One rank of one server: the backend, and the host pool that it reads from and writes to."""

    def __init__(self, space: KeySpace, settings: SGLangHF3FSSettings) -> None:
        self.pool = space.pool
        self.host = _HostPool(space)
        self.backend = _started(space, settings, self.host)
        self.backend.register_mem_pool_host(self.host)
        if self.pool != KV:
            self.backend.register_mem_host_pool_v2(self.host, self.pool)

    def exists(self, keys: list[str]) -> list[bool]:
        if self.pool == KV:
            return results_from_prefix_counts(self.backend.batch_exists, keys)
        found: list[bool] = self._metadata("exists", self._stored(keys))
        return found

    def get(self, keys: list[str], pages: Sequence[Page]) -> list[bool]:
        with self.host.filled_with(pages) as indices:
            if self.pool == KV:
                verdicts: list[bool] = self.backend.batch_get_v1(keys, indices)
                return verdicts
            return self._v2(self.backend.batch_get_v2, keys, indices)

    def set(self, keys: list[str], pages: Sequence[Page]) -> list[bool]:
        with self.host.filled_with(pages) as indices:
            if self.pool == KV:
                flags: list[bool] = self.backend.batch_set_v1(keys, indices)
                return flags
            return self._v2(self.backend.batch_set_v2, keys, indices)

    def delete(self, keys: list[str]) -> None:
        """Delete pages from the metadata, as the backend's `delete` does, which no engine calls."""
        self._metadata("delete_keys", self._stored(keys))

    def clear(self) -> int:
        kept = self.backend.metadata_client._get_metadata(  # noqa: SLF001 - there is no public count
            self.backend.rank, self.pool
        )
        before = len(kept.key_to_index) // (2 if self._has_halves else 1)
        self.backend.clear()
        return before

    @property
    def _has_halves(self) -> bool:
        return self.pool == KV and self.backend.mha_zero_copy

    def _stored(self, keys: list[str]) -> list[str]:
        """Return the names under which the backend's metadata has the pages of these keys."""
        backend = self.backend
        if self._has_halves:
            names: list[str] = backend._get_mha_zero_copy_keys(keys)  # noqa: SLF001
            return names
        if self.pool == KV:
            return keys
        return [backend._pool_component_key(key, self.pool) for key in keys]  # noqa: SLF001

    def _metadata(self, operation: str, keys: list[str]) -> Any:
        call = getattr(self.backend.metadata_client, operation)
        return call(self.backend.rank, keys, namespace=self.pool)

    def _v2(self, call: Any, keys: list[str], indices: Any) -> list[bool]:
        transfer = module("mem_cache.hicache_storage").PoolTransfer(
            name=self.pool, host_indices=indices, keys=keys
        )
        verdicts: list[bool] = call([transfer])[self.pool]
        return verdicts


class _HostPool:
    """The methods of SGLang's host pool that the backend calls, over the pages of the running calls."""

    page_size = 1

    def __init__(self, space: KeySpace) -> None:
        self._page_nbytes = space.stored_nbytes
        halves = space.shard.heads is not None and not space.pool.endswith(("indexer", "mamba"))
        self.in_place = space.layout in ("page_first", "page_first_direct") and not (
            halves and self._page_nbytes % 2
        )
        self.layout = space.layout if self.in_place else "layer_first"
        self._parts = 2 if halves and self._page_nbytes > 1 else 1
        self._pages: dict[int, Page] = {}
        self._numbers = itertools.count()

    @contextmanager
    def filled_with(self, pages: Sequence[Page]) -> Generator[Any]:
        """Put pages into the pool for the duration of the block. Yield their host indices."""
        numbers = [next(self._numbers) for _ in pages]
        self._pages.update(zip(numbers, pages, strict=True))
        try:
            yield _torch().tensor(numbers, dtype=_torch().int64)
        finally:
            for number in numbers:
                del self._pages[number]

    def get_size_per_token(self) -> int:
        return self._page_nbytes

    def get_ksize_per_token(self) -> int:
        """Return the size of K, as in `MHATokenToKVPoolHost`, or the whole size if there is no V."""
        return self._page_nbytes // self._parts

    def get_data_page(self, index: Any, *, flat: bool) -> Any:
        (segment,) = self._pages[int(index)].segments
        memory = bytearray(segment) if segment.readonly else segment
        page = _torch().frombuffer(memory, dtype=_torch().uint8)
        return page if flat else page.view(self._parts, -1)

    def get_dummy_flat_data_page(self) -> Any:
        return _torch().zeros(self._page_nbytes, dtype=_torch().uint8)

    def set_from_flat_data_page(self, index: Any, data: Any) -> None:
        self._pages[int(index)].copy_from(data.numpy())


def _started(space: KeySpace, settings: SGLangHF3FSSettings, host: _HostPool) -> Any:
    """Return a new backend, made from its config file as SGLang's `backend_factory.py` makes it.

    Raises:
        UnsupportedOperation: The backend refuses MLA models with metadata in the process.
    """
    engine = storage_config(space, settings)
    engine.extra_config["use_mock_hf3fs_client"] = True
    if engine.is_mla_model:
        raise UnsupportedOperation("HiCacheHF3FS takes MLA models with a metadata server only")
    nbytes = host.get_ksize_per_token() if host.in_place else host.get_size_per_token()
    file_nbytes = settings.capacity_nbytes or settings.slots * space.stored_nbytes
    directory = Path(settings.path)
    fields = {
        "file_path_prefix": str(directory / f"pages{space.stored_nbytes}"),
        "file_size": file_nbytes,
        "numjobs": settings.numjobs,
        "entries": settings.entries,
    }
    with _STARTING, _off_main_thread():
        path = directory / "hf3fs.json"
        path.write_text(json.dumps(fields), encoding="utf-8")
        os.environ[_CONFIG_PATH] = str(path)
        try:
            backend = _hf3fs().HiCacheHF3FS
            return backend.from_env_config(nbytes, _torch().uint8, engine)
        finally:
            del os.environ[_CONFIG_PATH]


def _hf3fs() -> Any:
    replace_classes(_UNUSED_CLASSES)
    return module(f"{_PACKAGE}.storage_hf3fs")


@contextmanager
def _off_main_thread() -> Generator[None]:
    """Leave out the backend's signal handlers if this is not the main thread.

    The backend's constructor sets signal handlers, which only the main thread may do. The engine
    calls the constructor there, but checks of the kit also open a backend on other threads.
    """
    if threading.current_thread() is threading.main_thread():
        yield
        return
    theirs, real = _hf3fs(), importlib.import_module("signal")
    theirs.signal = types.SimpleNamespace(**{**vars(real), "signal": _set_nothing})
    try:
        yield
    finally:
        theirs.signal = real


def _set_nothing(*_: object) -> None:
    """Stand in for `signal.signal`, and do nothing."""


def _torch() -> Any:
    return importlib.import_module("torch")
