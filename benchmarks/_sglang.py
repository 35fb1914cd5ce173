"""SGLang's own backends, loaded from its wheel without the rest of SGLang.

Two modules are replaced; all measured code is the wheel's:

* `sglang` is an empty package that points into the wheel. The real `__init__` loads the front-end
  language and patches transformers.
* `triton` is an empty module, because `sglang.srt.utils.common` imports it. The evictor uses one
  function of `common`, which parses sizes. No kernel is called.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import types
from importlib import metadata
from typing import TYPE_CHECKING, Any

from _harness import console
from _store import Memory, Store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

WHEEL_VERSION = "0.5.23"

# The 3FS backend imports these for annotations, metrics and its HTTP server. None of them is used.
_UNUSED = {
    "sglang.srt.mem_cache.pool_host": ("HostKVCache", "HostTensorAllocator"),
    "sglang.srt.observability.metrics_collector": ("StorageMetrics",),
    "fastapi": ("FastAPI", "HTTPException", "Request", "Response"),
    "fastapi.responses": ("ORJSONResponse",),
    "uvicorn": (),
}
_UNUSED_BY_MOONCAKE = {
    "sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler": ("DevicePoolEntry",),
    "sglang.srt.mem_cache.pool_host": ("HostKVCache", "HostTensorAllocator"),
    "sglang.srt.mem_cache.pool_host.mla": ("MLATokenToKVPoolHost",),
    "sglang.srt.observability.metrics_collector": ("StorageMetrics",),
}
_MOONCAKE_FIELDS = ("master_server_address", "local_hostname", "protocol", "master_metrics_port")
_TAKEN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)


class V1Store(Store):
    """A backend over a host pool, called as SGLang's controller calls it: one buffer per page (MLA)."""

    _backend: Any

    def _use(self, backend: Any) -> None:
        self._backend = backend
        self._pools = _HostPool(self.source), _HostPool(self.destination)

    def set_part(self, hashes: Sequence[str], part: slice) -> None:
        self._move(self._backend.batch_set_v1, 0, hashes, part)

    def get_part(self, hashes: Sequence[str], part: slice) -> None:
        self._move(self._backend.batch_get_v1, 1, hashes, part)

    def _move(self, call: Any, pool: int, hashes: Sequence[str], part: slice) -> None:
        self._backend.mem_pool_host = self._pools[pool]
        if not all(call(hashes, range(self.source.pages)[part])):
            raise RuntimeError(f"{self.name} refused or lost a page")


def is_installed() -> bool:
    """Return True if this environment has the wheel."""
    try:
        return metadata.version("sglang") == WHEEL_VERSION
    except metadata.PackageNotFoundError:
        return False


def libraries(*others: str) -> list[str]:
    """Return the distributions that SGLang's backends need, if installed: `others` and the wheel."""
    return [*others, "sglang"] if is_installed() else []


def tell(target: str) -> None:
    """If this environment lacks the wheel, print which make target makes an environment with it."""
    if not is_installed():
        console.print(f"SGLang {WHEEL_VERSION} is not here: `make {target}` has it")


def hicache_file(directory: Path, *, capacity_nbytes: int | None = None) -> Any:
    """Return the file backend of one rank in `directory`. A capacity adds SGLang's LRU evictor."""
    module = _hicache_storage()
    os.environ.pop(
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", None
    )  # it would take precedence over `directory`
    extra = {} if capacity_nbytes is None else {"max_size": capacity_nbytes}
    return module.HiCacheFile(_config(module, extra), str(directory))


def seaweedfs_store(extra: dict[str, Any]) -> Any:
    """Return the S3 backend of one rank."""
    config = _config(_hicache_storage(), extra)
    name = "sglang.srt.mem_cache.storage.seaweedfs.seaweedfs_store"
    return importlib.import_module(name).SeaweedFSStore(config)


def _config(module: Any, extra: dict[str, Any]) -> Any:
    return module.HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="benchmarks/model",
        extra_config=extra,
    )


def hicache_hf3fs(directory: Path, file_nbytes: int, page_nbytes: int) -> Any:
    """Return the 3FS backend of one rank over plain files, with local metadata."""
    _hicache_storage()
    _stand_in(_UNUSED)
    package = "sglang.srt.mem_cache.storage.hf3fs"
    storage = importlib.import_module(f"{package}.storage_hf3fs")
    metadata_of = importlib.import_module(f"{package}.mini_3fs_metadata_server")
    logging.getLogger("sglang").setLevel(logging.WARNING)  # its metadata server enables INFO
    handlers = {number: signal.getsignal(number) for number in _TAKEN_SIGNALS}
    backend = storage.HiCacheHF3FS(
        rank=0,
        file_path=str(directory / "pages.bin"),
        file_size=file_nbytes,
        numjobs=16,
        bytes_per_page=page_nbytes,
        entries=8,
        client_timeout=60,
        dtype=_torch().bfloat16,
        metadata_client=metadata_of.Hf3fsLocalMetadataClient(),
        is_page_first_layout=True,
        use_mock_client=True,
    )
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return backend


def mooncake_store(config: dict[str, Any], native: Any) -> Any:
    """Return the `MooncakeStore` of one rank. It calls `native`, an open client on the cluster.

    The store opens its own client, which we close, because two busy clients share their bandwidth.
    """
    module = _hicache_storage()
    _stand_in(_UNUSED_BY_MOONCAKE)
    theirs = importlib.import_module("sglang.srt.mem_cache.storage.mooncake_store.mooncake_store")
    fields = {"global_segment_size": 0, **{name: config[name] for name in _MOONCAKE_FIELDS}}
    backend = theirs.MooncakeStore(_config(module, fields))
    backend.is_mla_backend = True  # a page is one object, not one for K and one for V
    backend.store.close()
    backend.store = native
    return backend


class _HostPool:
    """The part of a host pool that the backends use. Each page has one buffer and one index."""

    page_size = 1

    def __init__(self, memory: Memory) -> None:
        self.kv_buffer = memory.whole
        self._addresses = [row.ctypes.data for row in memory.rows]
        self._page_nbytes = memory.page_nbytes

    def get_page_buffer_meta(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        return [self._addresses[index] for index in indices], [self._page_nbytes] * len(indices)


def flat_pages(memory: Memory) -> list[torch.Tensor]:
    """Return the pages of `memory` as tensors."""
    return [_torch().from_numpy(row).view(_torch().bfloat16) for row in memory.rows]


def _stand_in(unused: dict[str, tuple[str, ...]]) -> None:
    """Put empty modules, with these classes, in place of modules that are imported but not used."""
    for name, classes in unused.items():
        module = types.ModuleType(name)
        vars(module).update({each: type(each, (), {}) for each in classes})
        sys.modules.setdefault(name, module)


def _torch() -> Any:
    return importlib.import_module("torch")


def _hicache_storage() -> Any:
    name = "sglang.srt.mem_cache.hicache_storage"
    if name not in sys.modules:
        package = types.ModuleType("sglang")
        package.__path__ = [str(metadata.distribution("sglang").locate_file("sglang"))]
        sys.modules["sglang"] = package
        sys.modules.setdefault("triton", types.ModuleType("triton"))
    return importlib.import_module(name)
