"""vLLM's `fs` tier: one file per row, with directories of its own for each model.

`batch_exists` is a request that looks up its keys. `batch_get` is a request that looks up its keys
and loads the hits with one job, as vLLM's tiering manager promotes the hits of a request.
`batch_set` is a request that stores each page with a job of its own, because a store has one result
per job. The keys of a job are a set, so a page that is twice in a batch is stored and loaded once.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from field.adapter import (
    NO_CHECKSUM,
    NO_CLEAR,
    NO_CONFIG_CHECK,
    NO_DELETE,
    NO_LISTING,
    NO_READ_ONLY,
    AdaptedStorage,
)
from field.vllm.engine import (
    WHOLE_ROWS_ONLY,
    TierSettings,
    module,
    offload_key,
    offloading_spec,
    preload,
    require_whole_rows,
    rows_of,
    secondary_tier,
)
from field.vllm.steps import TierSteps
from hicache_storage.storage import Capabilities, Durability, Retention

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

preload()


class VllmFsSettings(TierSettings):
    """Settings of the engine and the tier, and where the files lie."""

    path: str
    """`root_dir` of the tier's config."""
    unlinks: bool = False
    """True: delete a page by unlinking its file, as an operator's clean-up does and vLLM never does."""


class Engine:
    """One engine with its secondary tier: the rows of the CPU tier, and the scheduler's steps."""

    def __init__(self, space: KeySpace, settings: VllmFsSettings) -> None:
        spec = offloading_spec(space, settings)
        self._rows = rows_of(spec)
        fields = {"type": "fs", "root_dir": settings.path, **settings.secondary_tier}
        self._steps = TierSteps(secondary_tier(fields, self._rows, spec))

    def look_up(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return the keys that the tier holds."""
        with self._steps.request() as context:
            return self._steps.look_up(context, keys) if keys else set()

    def load(self, targets: Mapping[bytes, list[Page]]) -> set[bytes]:
        """Load the row of each key into the pages of that key. Return the keys that were loaded."""
        loaded: set[bytes] = set()
        for keys in self._pieces(targets):
            with self._steps.request() as context:
                held = self._steps.look_up(context, keys)
                hits = [key for key in keys if key in held]
                if hits:
                    loaded |= self._load_hits(context, hits, targets)
        return loaded

    def store(self, sources: Mapping[bytes, Page]) -> set[bytes]:
        """Store pages. Return the keys whose jobs succeeded."""
        stored: set[bytes] = set()
        for keys in self._pieces(sources):
            with self._steps.request() as context, self._rows.reserved(len(keys)) as rows:
                for key, row in zip(keys, rows, strict=True):
                    self._rows.write(row, sources[key])
                jobs = [
                    self._steps.submit(context, [key], [row], load=False)
                    for key, row in zip(keys, rows, strict=True)
                ]
                for job in jobs:
                    stored |= job.result()
        return stored

    def close(self) -> None:
        self._steps.close()

    def _load_hits(
        self, context: Any, hits: Sequence[bytes], targets: Mapping[bytes, list[Page]]
    ) -> set[bytes]:
        with self._rows.reserved(len(hits)) as rows:
            loaded = self._steps.submit(context, hits, rows, load=True).result()
            for key, row in zip(hits, rows, strict=True):
                for page in targets[key] if key in loaded else []:
                    self._rows.read(row, page)
        return loaded

    def _pieces(self, pages: Mapping[bytes, Any]) -> Iterator[list[bytes]]:
        keys = list(pages)
        for start in range(0, len(keys), self._rows.count):
            yield keys[start : start + self._rows.count]


class VllmFs(AdaptedStorage):
    """vLLM's `vllm.v1.kv_offload.tiering.fs.manager.FileSystemTierManager`, one for each model."""

    distribution = "vllm"
    absent: ClassVar[Mapping[str, str]] = {
        **NO_CONFIG_CHECK,
        **NO_LISTING,
        **NO_READ_ONLY,
        **NO_DELETE,
        **NO_CLEAR,
        **NO_CHECKSUM,
        **WHOLE_ROWS_ONLY,
    }
    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.CRASH,
        shared=True,
        overwrites=False,
        scatter_gather=False,
        parallelism=16,
    )

    def __init__(self, settings: VllmFsSettings) -> None:
        self._settings = settings
        self._engines: dict[tuple[object, ...], Engine] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(VllmFsSettings.parse("vllm_fs", config))

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self.engine(space)

    def engine(self, space: KeySpace) -> Engine:
        """Return the engine of a key space. The first use starts it."""
        require_whole_rows(space, self._settings)
        layers = space.shard.layers
        place = (space.model, space.dtype, space.page_tokens, layers, space.stored_nbytes)
        with self._lock:
            self.ensure_open()
            if place not in self._engines:
                self._engines[place] = Engine(space, self._settings)
            return self._engines[place]

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        keys = [offload_key(space, page_hash) for page_hash in hashes]
        held = self.engine(space).look_up(list(dict.fromkeys(keys)))
        return [key in held for key in keys]

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        keys = [offload_key(space, page_hash) for page_hash in hashes]
        targets: dict[bytes, list[Page]] = {}
        for key, page in zip(keys, pages, strict=True):
            targets.setdefault(key, []).append(page)
        loaded = self.engine(space).load(targets)
        return [key in loaded for key in keys]

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        keys = [offload_key(space, page_hash) for page_hash in hashes]
        sources: dict[bytes, Page] = {}
        for key, page in zip(keys, pages, strict=True):
            sources.setdefault(key, page)
        stored = self.engine(space).store(sources)
        return [key in stored for key in keys]

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        if not self._settings.unlinks:
            return super().batch_delete(space, hashes)
        self.ensure_open()
        for page_hash in hashes:
            self.path_of(space, page_hash).unlink(missing_ok=True)
        return [True] * len(hashes)

    def close(self) -> None:
        """Shut down every tier."""
        if not self._closed:
            super().close()
            with self._lock:
                engines = [] if self.is_forked_copy else list(self._engines.values())
            for engine in engines:
                engine.close()

    def path_of(self, space: KeySpace, page_hash: str) -> Path:
        """Return the file of a page, as the tier's `FileMapper` names it, for back doors."""
        mapper = module("vllm.v1.kv_offload.file_mapper").FileMapper.from_offloading_spec(
            root_dir=self._settings.path,
            offloading_spec=offloading_spec(space, self._settings),
            parallel_agnostic=True,
        )
        return Path(mapper.get_file_name(offload_key(space, page_hash)))
