"""SGLang's `MooncakeStore`: one object per buffer of a page, in the memory of a Mooncake cluster."""

from __future__ import annotations

import importlib
import urllib.request
from typing import TYPE_CHECKING, Any, ClassVar, Self

from field.sglang.engine import KV, EngineSettings, module, page_key, replace_classes
from field.sglang.host_pool import HalvedHostPool, HostPool, WholeHostPool
from field.sglang.zero_copy import ZeroCopyStorage, pool_name
from hicache_storage.errors import UnsupportedOperation
from hicache_storage.storage import Capabilities, Durability, Retention

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.keys import KeySpace


class _Unused:
    """A stand-in for a class that the backend constructs only if metrics or a device are in use."""


_POOLS: dict[str, dict[str, type]] = {
    "mem_cache.hybrid_cache.linker_pool_assembler": {"DevicePoolEntry": _Unused},
    "mem_cache.memory_pool_host": {"DeepSeekV4PagedHostPool": _Unused},
    "mem_cache.pool_host": {"HostKVCache": HostPool, "HostTensorAllocator": _Unused},
    "mem_cache.pool_host.mha": {"MHATokenToKVPoolHost": HalvedHostPool},
    "mem_cache.pool_host.mla": {"MLATokenToKVPoolHost": WholeHostPool},
    "observability.metrics_collector": {"StorageMetrics": _Unused},
}
"""Classes to replace. The backend tells pools of MHA from pools of MLA by their classes."""


class SGLangMooncake(ZeroCopyStorage):
    """SGLang's `sglang.srt.mem_cache.storage.mooncake_store.mooncake_store.MooncakeStore`.

    `extra_config` holds the store's fields: `master_server_address`, `protocol`,
    `global_segment_size`, ... If an engine lends no memory (a `global_segment_size` of 0) but other
    processes of the cluster do, pages outlive the engine.
    """

    absent: ClassVar[Mapping[str, str]] = {
        **ZeroCopyStorage.absent,
        "open_space": "its engine cuts layers and heads into equal parts, and has pools of fixed names",
    }
    capabilities = Capabilities(
        retention=Retention.UNTIL_PRESSURE,
        durability=Durability.CRASH,
        shared=True,
        overwrites=False,
        scatter_gather=False,
        max_batch=ZeroCopyStorage.capabilities.max_batch,
    )

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        if settings.extra_config.get("global_segment_size") != 0:
            self.narrow(durability=Durability.PROCESS)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(EngineSettings.parse("sglang_mooncake", config))

    def open_space(self, space: KeySpace) -> None:
        if pool_name(space) == space.pool and type(pool_name(space)) is str:
            raise UnsupportedOperation(
                f"SGLang has no pool {space.pool!r}, and MooncakeStore no key"
            )
        super().open_space(space)

    def make_backend(self, config: Any) -> Any:
        replace_classes(_POOLS)
        return module("mem_cache.storage.mooncake_store.mooncake_store").MooncakeStore(config)

    def sidecar_exists(self, backend: Any, space: KeySpace, keys: Sequence[str]) -> list[bool]:
        names, buffers = _sidecar_names(backend, space, keys)
        found: list[int] = backend._batch_exist(names)  # noqa: SLF001 - its v2 interface calls it, too
        there = [state == 1 for state in found]
        return [all(there[i : i + buffers]) for i in range(0, len(there), buffers)]

    def clear(self, space: KeySpace) -> int:
        """Call the backend's `clear` at this rank. Count the removed pages by the master's key list."""
        rank = self.rank(space)
        before = _objects(rank.backend)
        rank.backend.clear()
        names = self.objects_of(space, "0" * 64)
        return (before - _objects(rank.backend)) // len(names)

    def objects_of(self, space: KeySpace, page_hash: str) -> list[tuple[str, int]]:
        """Return the name and the size of each object of a page, for back doors."""
        rank, key = self.rank(space), page_key(space, page_hash)
        pool = rank.pool(space)
        if space.pool == KV:
            with pool.take_slots(1) as slots:
                names, _, _ = rank.backend._batch_preprocess(  # noqa: SLF001 - there is no public method
                    rank.backend._tag_keys([key]),  # noqa: SLF001
                    _torch().tensor(slots),
                )
        else:
            names, _ = _sidecar_names(rank.backend, space, [key])
        sizes = pool.part_nbytes if len(names) > 1 else [sum(pool.part_nbytes)]
        return list(zip(names, sizes, strict=True))


def _objects(backend: Any) -> int:
    """Return how many objects with this model and tag are in the cluster."""
    host = backend.config.master_server_address.partition(":")[0]
    url = f"http://{host}:{backend.config.master_metrics_port}/get_all_keys"
    with urllib.request.urlopen(url) as answer:
        names = answer.read().decode().split()
    return sum(name.startswith(f"{backend.config_prefix}_") for name in names)


def _sidecar_names(backend: Any, space: KeySpace, keys: Sequence[str]) -> tuple[list[str], int]:
    """Return the names of the objects of pages outside the KV pool, and how many each page has."""
    transfer = module("mem_cache.hicache_storage").PoolTransfer(name=pool_name(space))
    names, buffers = backend._get_hybrid_page_component_keys(list(keys), transfer)  # noqa: SLF001
    return backend._tag_keys(names), buffers  # noqa: SLF001


def _torch() -> Any:
    return importlib.import_module("torch")
