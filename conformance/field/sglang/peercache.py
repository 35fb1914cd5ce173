"""PeerCache's `PeerCacheStore`: a client of a storage server, as SGLang's `dynamic` backend calls it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar, Self

from field.adapter import NO_CLEAR
from field.sglang.engine import EngineSettings, module
from field.sglang.zero_copy import ZeroCopyStorage, pool_name
from hicache_storage.storage import Capabilities, Durability, Retention

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.keys import KeySpace


class PeerCache(ZeroCopyStorage):
    """`peercache.store.PeerCacheStore` in its mode `centralized`, over TCP.

    `extra_config` holds the store's fields. The pages are in the memory of the storage server.
    """

    distribution = "peercache"
    absent: ClassVar[Mapping[str, str]] = {**ZeroCopyStorage.absent, **NO_CLEAR}
    capabilities = Capabilities(
        retention=Retention.UNTIL_PRESSURE,
        durability=Durability.CRASH,
        shared=True,
        overwrites=False,
        scatter_gather=False,
        max_batch=ZeroCopyStorage.capabilities.max_batch,
    )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(EngineSettings.parse("peercache", config))

    def make_backend(self, config: Any) -> Any:
        module("mem_cache.hicache_storage")
        return importlib.import_module("peercache.store").PeerCacheStore(config, None)

    def sidecar_exists(self, backend: Any, space: KeySpace, keys: Sequence[str]) -> list[bool]:
        transfer = module("mem_cache.hicache_storage").PoolTransfer(
            name=pool_name(space), keys=list(keys)
        )
        names, parts = backend._v2_component_keys(transfer)[:2]  # noqa: SLF001 - there is no public one
        found: list[Any] = backend._dir_get(names)  # noqa: SLF001 - its v2 interface calls it, too
        there = [location is not None for location in found]
        return [all(there[i : i + parts]) for i in range(0, len(there), parts)]
