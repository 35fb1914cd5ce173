"""The adapters for SGLang. They make every backend of this project usable as SGLang's `dynamic` backend.

Below SGLang's HiCache:

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
      '{"backend_name": "redis", "url": "redis://127.0.0.1:6379/0"}'

Directly below the radix tree, without a cache in host memory:

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config
      '{"linker_extra_config": {"backend_name": "redis", "url": "redis://127.0.0.1:6379/0"}}'

The first access to one of the classes imports SGLang. See docs/sglang.md for the guide.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hicache_storage.integrations.sglang._adapter import Adapter
    from hicache_storage.integrations.sglang._linker import Linker

    SGLangHiCacheStorage: type[Adapter]
    SGLangCacheLinker: type[Linker]

__all__ = ["SGLangCacheLinker", "SGLangHiCacheStorage"]

_STORAGE = "sglang.srt.mem_cache.hicache_storage"
_METRICS = "sglang.srt.observability.metrics_collector"
_CONTEXT = "sglang.srt.runtime_context"
_ARGUMENTS = "sglang.srt.server_args"
_VARIABLES = "sglang.srt.environ"
_FP8_KERNEL = "sglang.kernels.ops.quantization.fp8_kernel"
_INDEX_KEYS = "sglang.srt.layers.attention.dsa.utils"
_LINKER = (
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker",
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller",
    "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler",
)


def __getattr__(name: str) -> Any:
    make = {"SGLangHiCacheStorage": _storage_class, "SGLangCacheLinker": _linker_class}.get(name)
    if make is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = make()
    return found


def _storage_class() -> type[Adapter]:
    """Return the adapter as a subclass of SGLang's `HiCacheStorage`, which SGLang's factory requires.

    Raises:
        ImportError: SGLang is not installed, or its interface differs.
    """
    from hicache_storage.integrations.sglang._adapter import Adapter  # noqa: PLC0415
    from hicache_storage.integrations.sglang._engine import EngineTypes  # noqa: PLC0415
    from hicache_storage.integrations.sglang._interface import check_interface  # noqa: PLC0415

    storage = importlib.import_module(_STORAGE)
    metrics = importlib.import_module(_METRICS)
    check_interface(storage, metrics, _version())
    engine = EngineTypes(
        pool_transfer_result=storage.PoolTransferResult,
        storage_metrics=metrics.StorageMetrics,
        launch_arguments=_launch_arguments,
        launch_defaults=_launch_defaults,
        variables=_variable_defaults,
        version=_version,
        fp8_type=_fp8_type,
        index_key_order=_index_key_order,
        replica=_replica,
        argument_overrides=_argument_overrides,
    )
    members = {"engine": engine, "__module__": __name__, "__doc__": Adapter.__doc__}
    return type("SGLangHiCacheStorage", (Adapter, storage.HiCacheStorage), members)


def _linker_class() -> type[Linker]:
    """Return the linker as a subclass of SGLang's `UnifiedCacheLinker`, which SGLang's factory requires.

    Raises:
        ImportError: SGLang is not installed, or its interface differs.
    """
    from hicache_storage.integrations.sglang._interface import check_linker_interface  # noqa: PLC0415
    from hicache_storage.integrations.sglang._linker import Linker  # noqa: PLC0415

    module, controller, assembler = (importlib.import_module(name) for name in _LINKER)
    check_linker_interface(module, controller, assembler, _version())
    storage = importlib.import_module(__name__).SGLangHiCacheStorage
    members = {"storage_class": storage, "__module__": __name__, "__doc__": Linker.__doc__}
    return type("SGLangCacheLinker", (Linker, module.UnifiedCacheLinker), members)


def _version() -> str:
    return str(importlib.import_module("sglang").__version__)


def _launch_arguments() -> Mapping[str, Any]:
    """Return SGLang's resolved arguments with this process's overrides.

    Return an empty mapping outside a server.
    """
    context = importlib.import_module(_CONTEXT).get_context()
    try:
        arguments: Mapping[str, Any] = context.resolved_server_args_dict()
    except (RuntimeError, ValueError, AssertionError):  # no published arguments
        return {}
    return arguments


def _launch_defaults() -> Mapping[str, Any]:
    parameters = inspect.signature(importlib.import_module(_ARGUMENTS).ServerArgs).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def _variable_defaults() -> Mapping[str, str]:
    environ = cast("Any", importlib.import_module(_VARIABLES))
    fields: Iterable[Any] = environ.Envs.__dict__.values()
    defaults = {
        field.name: field.default() if callable(field.default) else field.default
        for field in fields
        if issubclass(type(field), environ.EnvField)
    }
    return {name: "" if default is None else str(default) for name, default in defaults.items()}


def _fp8_type(label: str) -> str:
    """Return what `configure_kv_cache_dtype` chooses. On ROCm, that depends on the chip."""
    from hicache_storage.integrations.sglang._launch import FP8_TYPES  # noqa: PLC0415

    torch: Any = importlib.import_module("torch")
    own = FP8_TYPES.get(label, "")
    if own and torch.version.hip:
        return str(importlib.import_module(_FP8_KERNEL).fp8_dtype).removeprefix("torch.")
    return own


def _index_key_order() -> str:
    """Return "tiles" if aiter's kernels reorder the index keys of sparse attention in each page."""
    is_tiled = importlib.import_module(_INDEX_KEYS).aiter_can_use_preshuffle_paged_mqa
    return "tiles" if is_tiled() else ""


def _replica() -> int:
    """Return the number of this process's data-parallel replica, counted from 0."""
    try:
        return importlib.import_module(_CONTEXT).get_parallel().dp_rank or 0
    except (AttributeError, RuntimeError, ValueError, AssertionError):  # no published ranks
        return 0


def _argument_overrides() -> Sequence[Mapping[str, Any]]:
    """Return the fields of each `RuntimeContext.override` in this process, in order."""
    context = importlib.import_module(_CONTEXT).get_context()
    return [fields for _, fields in context.overrides_log()]
