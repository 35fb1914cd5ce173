"""SGLang's own backends, `HiCacheFile` and `SeaweedFSStore`, out of its real wheel, without the rest.

Two things are put in front of the wheel's modules; all code that is measured is the wheel's:

* `sglang` itself is an empty package that points into the wheel. Its `__init__` loads the front-end
  language and patches transformers.
* `triton` is an empty module. `sglang.srt.utils.common`, of which the evictor uses one function that
  parses sizes, imports it; no kernel is called.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from importlib import metadata
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

WHEEL_VERSION = "0.5.23"


class HiCacheFile(Protocol):
    """What its controller calls (`_generic_page_get`, `_generic_page_set`)."""

    def batch_get(
        self, keys: Sequence[str], target_locations: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]: ...

    def batch_set(self, keys: Sequence[str], values: Sequence[torch.Tensor]) -> bool: ...


def is_installed() -> bool:
    """Whether this environment has the wheel."""
    try:
        return metadata.version("sglang") == WHEEL_VERSION
    except metadata.PackageNotFoundError:
        return False


def hicache_file(directory: Path, *, capacity_nbytes: int | None = None) -> HiCacheFile:
    """One rank's file backend in `directory`; with a capacity, with its LRU evictor."""
    module = _hicache_storage()
    os.environ.pop("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", None)  # it would win over `directory`
    extra = {} if capacity_nbytes is None else {"max_size": capacity_nbytes}
    backend: HiCacheFile = module.HiCacheFile(_config(module, extra), str(directory))
    return backend


def seaweedfs_store(extra: dict[str, Any]) -> Any:
    """One rank's S3 backend."""
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


def _hicache_storage() -> Any:
    name = "sglang.srt.mem_cache.hicache_storage"
    if name not in sys.modules:
        package = types.ModuleType("sglang")
        package.__path__ = [str(metadata.distribution("sglang").locate_file("sglang"))]
        sys.modules["sglang"] = package
        sys.modules.setdefault("triton", types.ModuleType("triton"))
    return importlib.import_module(name)
