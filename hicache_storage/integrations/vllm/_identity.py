"""Key spaces of vLLM's rows, made of every property that the bytes of a row depend on.

    property                                      source                         field
    model                                         served name                    model
    KV type                                       cache config, model config     dtype
    weights, quantization, overrides, drafts ...  `VllmConfig` (_facts.py)       revision
    layouts and types that no config has          environment (_variables.py)    revision
    hash algorithm, retention, CP interleave ...  `VllmConfig` (_facts.py)       revision
    layers, heads and sizes of every group        `KVCacheConfig` (_facts.py)    revision
    vLLM's release and the chips                  vLLM (_runtime.py)             layout
    byte order, model runner                      `VllmConfig`                   layout
    ranks, unless the bytes do not depend on them tier                           layout
    group and its kind                            tier                           pool
    tokens and bytes of a row                     tier                           page_tokens, page_nbytes

A row holds the bytes of all ranks and layers of a group, so all data-parallel replicas share pages.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import ConfigError
from hicache_storage.integrations.vllm._facts import cache_facts, model_facts, rank_facts
from hicache_storage.integrations.vllm._settings import NAME
from hicache_storage.integrations.vllm._variables import VARIABLES
from hicache_storage.keys import KeySpace, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_storage.integrations.vllm._runtime import Runtime
    from hicache_storage.integrations.vllm._settings import TierSettings

logger = logging.getLogger("vllm.hicache_storage")

_FORMAT = "vllm-rows-1"
_CRYPTOGRAPHIC = ("sha256", "sha256_cbor")


def check_engine(vllm_config: Any, *, single_node: bool) -> None:
    """Raise ConfigError for an engine whose pages cannot be identified or shared.

    Raises:
        ConfigError: The message names the reason and the remedy.
    """
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm not in _CRYPTOGRAPHIC:
        raise ConfigError(
            f"{NAME}: --prefix-caching-hash-algo {algorithm} cannot name pages of a store: xxhash is"
            " not collision resistant, and its seed is random in each process. Pass"
            " --prefix-caching-hash-algo sha256_cbor"
        )
    if algorithm == "sha256":
        logger.info(
            "--prefix-caching-hash-algo sha256_cbor is recommended for shared stores: the default"
            " sha256 hashes pickled objects, so equal requests with LoRA or images may have"
            " different hashes and miss"
        )
    parallel = vllm_config.parallel_config
    nodes = int(getattr(parallel, "nnodes_within_dp", 1))
    if nodes > 1:
        raise ConfigError(
            f"{NAME}: this engine has {nodes} nodes, but vLLM offloads to the host memory of the"
            " first node only: the KV of other nodes would be wrong. Use one node for each engine"
            " (one node with tensor parallelism, data parallelism across nodes)"
        )
    executor = executor_name(parallel)
    if executor not in ("mp", "uni") and parallel.world_size > 1 and not single_node:
        raise ConfigError(
            f"{NAME}: the executor {executor!r} may place workers on more than one node, but vLLM"
            " offloads to the host memory of one node only. Pass --distributed-executor-backend"
            ' mp, or set "single_node": true if all workers are on this node'
        )


def executor_name(parallel: Any) -> str:
    """Return the name of the executor that runs the workers."""
    backend = parallel.distributed_executor_backend
    if backend is None:
        return "uni" if parallel.world_size == 1 else "mp"
    return str(getattr(backend, "__name__", backend))


def identity_of(
    vllm_config: Any,
    kv_cache_config: Any,
    settings: TierSettings,
    runtime: Runtime,
    variables: Mapping[str, Callable[[], Any]],
) -> dict[str, Any]:
    """Return the identity that the connector passes to its tier in the field `identity`.

    Args:
        vllm_config: vLLM's configs.
        kv_cache_config: The groups of layers and their places in a block.
        settings: The tier's settings.
        runtime: vLLM's version and platform.
        variables: vLLM's environment variables, with functions that return their values.

    Raises:
        ConfigError: A property that the bytes depend on is unknown, or the weights cannot be read.
    """
    facts = {
        "model": model_facts(vllm_config, settings, runtime.started_s),
        "cache": cache_facts(vllm_config, kv_cache_config),
        "ranks": rank_facts(vllm_config, executor_name(vllm_config.parallel_config)),
    }
    effective = _values(variables) if settings.share_between_releases else None
    if environment := VARIABLES.facts(variables, effective):
        facts["environment"] = environment
    text = json.dumps(facts, sort_keys=True, default=str)
    logger.info("the identity of this engine's KV: %s", text)
    runner = "v2" if getattr(vllm_config, "use_v2_model_runner", False) else "v1"
    model = vllm_config.model_config
    served: Any = model.served_model_name or model.model
    names = [served] if isinstance(served, str) else list(served)
    return {
        "model": str(names[0]),
        "dtype": kv_dtype(vllm_config, kv_cache_config, settings, runtime),
        "revision": hashlib.sha256(text.encode()).hexdigest()[:32],
        "layout": f"{runtime.labels(settings)};runner={runner}",
        "groups": {
            str(number): type(spec).__name__ for number, spec in enumerate(_specs(kv_cache_config))
        },
    }


def _values(variables: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """Return the values that this release uses for variables that may be unset."""
    values = {name: variables[name]() for name in VARIABLES.entering if name in variables}
    return {name: str(value) for name, value in values.items() if value is not None}


def kv_dtype(
    vllm_config: Any, kv_cache_config: Any, settings: TierSettings, runtime: Runtime
) -> str:
    """Return the logical type of the KV.

    Raises:
        ConfigError: vLLM stores KV as bytes, and neither its flags nor our config names the type.
    """
    if settings.kv_dtype:
        return settings.kv_dtype
    label = str(vllm_config.cache_config.cache_dtype)
    if label == "auto":
        label = str(vllm_config.model_config.dtype).removeprefix("torch.")
        stored = {_torch_name(spec.dtype) for spec in _specs(kv_cache_config) if _has_dtype(spec)}
        packed = sorted(name for name in stored if name == "uint8" or name.startswith("float8"))
        if packed:
            label = "fp8"
    return runtime.fp8_type(label)


def spaces_of(
    spec: Any, row_nbytes: int, settings: TierSettings, runtime: Runtime
) -> dict[int, KeySpace]:
    """Return the key space of each group, by its number in an offload key.

    Raises:
        ConfigError: The settings have no identity.
    """
    identity = settings.identity
    if identity is None:
        raise ConfigError(
            f"{NAME}: identity: this field is required without HiCacheConnector, because vLLM shows a"
            ' tier neither weights nor quantization: use "kv_connector": "HiCacheConnector", or set'
            ' "identity": {"revision": "..."} to a text that changes with all of them'
        )
    config = spec.config
    revision = ";".join(part for part in (settings.revision, identity.revision) if part)
    layers = max(1, sum(len(group.layer_names) for group in config.groups))
    return {
        group.group_id: KeySpace(
            model=identity.model or str(config.model.name),
            dtype=identity.dtype or settings.kv_dtype or runtime.fp8_type(str(config.model.dtype)),
            layout=_layout(config, identity.layout or runtime.labels(settings)),
            page_tokens=group.tokens_per_block * config.cache.blocks_per_chunk,
            page_nbytes=row_nbytes,
            shard=Shard(layers=(0, layers)),
            pool=_pool(group.group_id, identity.groups),
            revision=revision,
            tenant=settings.tenant,
        )
        for group in config.groups
    }


def renewed(space: KeySpace, epoch: str) -> KeySpace:
    """Return the key space that replaces `space` after a change of weights. `epoch` names the change."""
    return _revised(space, f"since={epoch}")


def of_adapter(space: KeySpace, fingerprint: str) -> KeySpace:
    """Return the key space of a LoRA adapter with these weights."""
    return _revised(space, f"lora={fingerprint}")


def _revised(space: KeySpace, part: str) -> KeySpace:
    return KeySpace.from_manifest({**space.manifest(), "revision": f"{space.revision};{part}"})


def _layout(config: Any, own: str) -> str:
    parallel = config.parallel
    parts = [_FORMAT, f"order={config.kv_cache_layout}", own]
    if config.canonical_layout:
        parts.append("canonical")
    elif config.replicated_layout:
        parts.append("replicated")
    # Direct rows hold the bytes of one rank after the other, and layer by layer within a rank. So a
    # different number of ranks means a different order, even if vLLM calls it parallelism-agnostic.
    portable = config.canonical_layout and parallel.is_parallelism_agnostic
    if not portable and not config.replicated_layout:
        parts.append(f"tp={parallel.tp_size};pp={parallel.pp_size}")
        parts.append(f"pcp={parallel.pcp_size};dcp={parallel.dcp_size}")
        parts.append(f"world={parallel.world_size}")
    parts.append(f"blocks={config.cache.blocks_per_chunk};hash={config.cache.tokens_per_hash}")
    return ";".join(parts)


def _pool(group: int, kinds: Mapping[str, str]) -> str:
    kind = kinds.get(str(group))
    return f"group_{group}.{kind}" if kind else f"group_{group}"


def _specs(kv_cache_config: Any) -> list[Any]:
    return [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]


def _has_dtype(spec: Any) -> bool:
    return getattr(spec, "dtype", None) is not None


def _torch_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
