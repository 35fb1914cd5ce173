"""The engine side of SGLang's in-tree backends: their modules, configs and keys.

SGLang's engine passes on these fields of a key space: the model, the place of the shard (as ranks
and sizes of tensor, pipeline and context parallelism), the pool, and in the page hash the tenant
and the tokens of a page. It does not pass on dtype, layout and revision.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import threading
import types
from importlib import metadata
from typing import TYPE_CHECKING, Any

from field.adapter import AdaptedStorage, equal_part
from hicache_storage.errors import BackendNotInstalled
from hicache_storage.keys import namespace_seed
from hicache_storage.settings import Field, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.keys import KeySpace, Shard

BATCH_PAGES = 128
"""How many pages SGLang's controller passes in one call: `STORAGE_BATCH_SIZE`."""
KV = "kv"
_LOADING = threading.Lock()


class EngineSettings(Settings):
    """Settings of the engine, whose ranks hold the shards of key spaces, and of its backend."""

    total_heads: int = Field(default=16, ge=1)
    """The model's KV heads: a shard of `n` is one of `total_heads / n` tensor-parallel ranks."""
    total_layers: int = Field(default=32, ge=1)
    extra_config: dict[str, Any] = Field(default_factory=dict[str, Any])
    """`--hicache-storage-backend-extra-config`, passed to the backend unchanged."""


class SGLangStorage(AdaptedStorage):
    """One of SGLang's backends, with one instance for each rank of each model, as in its engine."""

    distribution = "sglang"

    def __init__(self, settings: EngineSettings) -> None:
        self._engine = settings
        self._ranks: dict[tuple[str, Shard, bool, int], Any] = {}
        self._replicated: set[str] = set()
        self._lock = threading.Lock()

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self.rank(space)

    def rank(self, space: KeySpace) -> Any:
        """Return the rank that holds the shard of `space`. The first use starts its backend.

        A model counts as MLA for its engine (`is_mla_model`) if its KV pool has no heads, even if
        other pools of the model have heads.
        """
        self.ensure_open()
        with self._lock:
            if space.pool == KV and space.shard.heads is None:
                self._replicated.add(space.model)
            is_draft_of_mla = space.pool != KV and space.model in self._replicated
            place = (space.model, space.shard, is_draft_of_mla, self.engine_key(space))
            if place not in self._ranks:
                config = storage_config(space, self._engine)
                config.is_mla_model |= is_draft_of_mla
                self._ranks[place] = self.make_rank(space, config)
            return self._ranks[place]

    def engine_key(self, space: KeySpace) -> int:  # noqa: ARG002 - unused by this default
        """Return a number that differs for key spaces of one model that need separate engines."""
        return 0

    def make_rank(self, space: KeySpace, config: Any) -> Any:  # noqa: ARG002 - unused by this default
        """Return a new rank. In this base class, a rank is only an instance of the backend."""
        return self.make_backend(config)

    def make_backend(self, config: Any) -> Any:
        """Return a new instance of the backend. `config` is SGLang's `HiCacheStorageConfig`."""
        raise NotImplementedError(f"{type(self).__name__} has no make_backend(self, config)")

    def ranks(self) -> list[Any]:
        """Return every rank that was started."""
        with self._lock:
            return list(self._ranks.values())

    def close(self) -> None:
        """Close each rank that has a `close`, as the controller does when it detaches a backend."""
        if not self._closed:
            super().close()
            for rank in [] if self.is_forked_copy else self.ranks():
                if hasattr(rank, "close"):
                    rank.close()


def storage_config(space: KeySpace, engine: EngineSettings) -> Any:
    """Return SGLang's `HiCacheStorageConfig` for the rank that holds the shard of `space`.

    Raises:
        UnsupportedOperation: No cut of the model's layers and heads into equal parts has this shard.
    """
    shard = space.shard
    tp_rank, tp_size = (
        equal_part(shard.heads, engine.total_heads, "heads") if shard.heads else (0, 1)
    )
    pp_rank, pp_size = equal_part(shard.layers, engine.total_layers, "layers")
    cp_rank, cp_size = shard.context or (0, 1)
    return module("mem_cache.hicache_storage").HiCacheStorageConfig(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=pp_rank,
        pp_size=pp_size,
        attn_cp_rank=cp_rank,
        attn_cp_size=cp_size,
        is_mla_model=shard.heads is None,
        enable_storage_metrics=False,
        is_page_first_layout=space.layout == "page_first",
        model_name=space.model,
        extra_config=dict(engine.extra_config),
    )


def page_key(space: KeySpace, page_hash: str) -> str:
    """Return the page hash that SGLang's engine would compute from the tenant and the page's tokens."""
    seed = namespace_seed(cache_salt=space.tenant) if space.tenant else ""
    return hashlib.sha256(f"{seed}|{space.page_tokens}|{page_hash}".encode()).hexdigest()


def page_keys(space: KeySpace, hashes: Sequence[str]) -> list[str]:
    """Return the page hashes that SGLang's engine would compute."""
    return [page_key(space, page_hash) for page_hash in hashes]


def pool_keys(space: KeySpace, hashes: Sequence[str]) -> list[str]:
    """Return the names of pages in the v2 interface: `hash` in the KV pool, `hash.pool` in others."""
    end = "" if space.pool == KV else f".{space.pool}"
    return [key + end for key in page_keys(space, hashes)]


def module(name: str) -> Any:
    """Return `sglang.srt.NAME` of the wheel, without the imports of `sglang` itself.

    `sglang` becomes an empty package that points into the wheel, because the real one loads a
    front-end language and patches transformers. If `triton` is not installed, it becomes an empty
    module, because storage uses no kernel.

    Raises:
        BackendNotInstalled: There is no wheel.
    """
    with _LOADING:
        _find_wheel()
    return importlib.import_module(f"sglang.srt.{name}")


def _find_wheel() -> None:
    """Make `sglang` and `triton` importable, once per process."""
    if "sglang" not in sys.modules:
        try:
            found = metadata.distribution("sglang").locate_file("sglang")
        except metadata.PackageNotFoundError:
            raise BackendNotInstalled(
                "SGLang's backends need its wheel: pip install --no-deps sglang==0.5.23"
                " (tests/requirements-sglang.txt has what its modules import)"
            ) from None
        package = types.ModuleType("sglang")
        package.__path__ = [str(found)]
        sys.modules["sglang"] = package
        if importlib.util.find_spec("triton") is None:
            sys.modules["triton"] = types.ModuleType("triton")


def replace_classes(unused: Mapping[str, Mapping[str, type]]) -> None:
    """Replace classes of SGLang that a backend imports but does not construct.

    The modules of these classes would import half of an engine. A backend uses the classes only in
    annotations, or in `isinstance`.
    """
    module("environ")
    for name, classes in unused.items():
        empty = types.ModuleType(f"sglang.srt.{name}")
        vars(empty).update(classes)
        sys.modules.setdefault(empty.__name__, empty)
