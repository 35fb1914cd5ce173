"""SGLang's in-tree backends: their modules out of its wheel, and what its engine would tell them.

Of a key space SGLang's engine passes on: model, the places of the shard (as ranks and sizes of tensor,
pipeline and context parallelism), pool, and in the page hash the tenant and the tokens of a page. It
passes on neither dtype nor layout nor revision.
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
"""So many pages SGLang's controller hands over in one call: `STORAGE_BATCH_SIZE`."""
KV = "kv"
_LOADING = threading.Lock()


class EngineSettings(Settings):
    """What the engine is, of which the shards of key spaces are ranks; and what is its backend's own."""

    total_heads: int = Field(default=16, ge=1)
    """KV heads of the model: a shard of `n` is one of `total_heads / n` tensor-parallel ranks."""
    total_layers: int = Field(default=32, ge=1)
    extra_config: dict[str, Any] = Field(default_factory=dict[str, Any])
    """`--hicache-storage-backend-extra-config`, handed to the backend as it is."""


class SGLangStorage(AdaptedStorage):
    """One of SGLang's backends. Each rank of each model has an instance of it, as in its engine."""

    distribution = "sglang"

    def __init__(self, settings: EngineSettings) -> None:
        self._engine = settings
        self._ranks: dict[tuple[str, Shard, bool, int], Any] = {}
        self._replicated: set[str] = set()
        self._starting = threading.Lock()

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self.rank(space)

    def rank(self, space: KeySpace) -> Any:
        """The backend's instance at the rank that holds this shard; started at its first use.

        A model is MLA to its engine (`is_mla_model`) where its KV pool has no heads, whatever its other
        pools have.
        """
        self.ensure_open()
        with self._starting:
            if space.pool == KV and space.shard.heads is None:
                self._replicated.add(space.model)
            beside = space.pool != KV and space.model in self._replicated
            place = (space.model, space.shard, beside, self.apart(space))
            if place not in self._ranks:
                config = storage_config(space, self._engine)
                config.is_mla_model |= beside
                self._ranks[place] = self.begin(space, config)
            return self._ranks[place]

    def apart(self, space: KeySpace) -> int:  # noqa: ARG002 - nothing, here
        """What else of a key space takes an engine of its own."""
        return 0

    def begin(self, space: KeySpace, config: Any) -> Any:  # noqa: ARG002 - for who has a host pool
        """What `rank` gives for a rank that is new: the instance, alone here."""
        return self.start(config)

    def start(self, config: Any) -> Any:
        """A new instance of the backend; `config` is SGLang's `HiCacheStorageConfig`."""
        raise NotImplementedError(f"{type(self).__name__} has no start(self, config)")

    def ranks(self) -> list[Any]:
        """Every instance that was started."""
        with self._starting:
            return list(self._ranks.values())

    def close(self) -> None:
        """As the controller detaches a backend: `close` where it has one."""
        if not self._closed:
            super().close()
            for rank in [] if self.is_forked_copy else self.ranks():
                if hasattr(rank, "close"):
                    rank.close()


def storage_config(space: KeySpace, engine: EngineSettings) -> Any:
    """SGLang's `HiCacheStorageConfig` of the rank that holds the shard of `space`.

    Raises:
        UnsupportedOperation: No equal cut of the model's layers and heads has this shard.
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
    """The page hash that SGLang's engine would make: tenant and tokens of a page are in it."""
    seed = namespace_seed(cache_salt=space.tenant) if space.tenant else ""
    return hashlib.sha256(f"{seed}|{space.page_tokens}|{page_hash}".encode()).hexdigest()


def page_keys(space: KeySpace, hashes: Sequence[str]) -> list[str]:
    """The same of many."""
    return [page_key(space, page_hash) for page_hash in hashes]


def pool_keys(space: KeySpace, hashes: Sequence[str]) -> list[str]:
    """What its v2 interface names pages of a pool: `hash`, and `hash.pool` beside the KV pool."""
    end = "" if space.pool == KV else f".{space.pool}"
    return [key + end for key in page_keys(space, hashes)]


def module(name: str) -> Any:
    """`sglang.srt.NAME` out of the wheel, without what `sglang` itself imports.

    `sglang` is an empty package that points into the wheel (its own loads a front-end language and
    patches transformers), `triton` an empty module where it is not installed: storage uses no kernel.

    Raises:
        BackendNotInstalled: There is no wheel.
    """
    with _LOADING:
        _find_wheel()
    return importlib.import_module(f"sglang.srt.{name}")


def _find_wheel() -> None:
    """Put `sglang` and `triton` in place; once a process."""
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


def stand_in(unused: Mapping[str, Mapping[str, type]]) -> None:
    """Put other classes in place of some of SGLang's that a backend imports and does not construct.

    For those whose modules import half of an engine, and that are named in annotations, or told apart.
    """
    module("environ")
    for name, classes in unused.items():
        empty = types.ModuleType(f"sglang.srt.{name}")
        vars(empty).update(classes)
        sys.modules.setdefault(empty.__name__, empty)
