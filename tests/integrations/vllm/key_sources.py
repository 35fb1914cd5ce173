"""The sources of vLLM's key spaces, each with pairs of engines that differ in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from key_sources import Pair

from hicache_storage.integrations.vllm._adapters import Adapter
from hicache_storage.integrations.vllm._identity import identity_of, of_adapter, spaces_of
from hicache_storage.integrations.vllm._runtime import Runtime
from hicache_storage.integrations.vllm._settings import IdentitySettings, TierSettings

NAME = "vLLM"

_FILES = {
    "config.json": json.dumps({"auto_map": {"AutoModel": "modeling_my.M"}}),
    "modeling_my.py": "INTERLEAVED = False",
    "preprocessor_config.json": json.dumps({"resample": 3}),
    "model.safetensors": "weights",
    "consolidated.safetensors": "the same weights",
    "adapter/adapter_model.bin": "adapter",
    "later/adapter_model.bin": "adapter",
    "draft/model.safetensors": "draft",
}
_BMM = "VLLM_ROCM_USE_AITER_FP8BMM"
_LONGROPE = {"rope_scaling": {"rope_type": "longrope"}}


@dataclass
class _ModelConfig:
    """Fields as those of vLLM's config: what is not known and differs from its default enters."""

    model: str = "."
    model_weights: str = ""
    served_model_name: str = "org/model"
    revision: str | None = None
    dtype: str = "torch.bfloat16"
    max_model_len: int = 4096
    quantization: str | None = None
    hf_overrides: Any = None
    hf_config: Any = None
    multimodal_config: Any = None
    seed: int = 0


@dataclass
class _LoRAConfig:
    default_mm_loras: dict[str, str] | None = None


@dataclass
class _Speculation:
    method: str | None = None
    draft_model_config: Any = None


@dataclass
class _Spec:
    block_size: int = 16
    num_kv_heads: int = 8
    head_size: int = 128
    dtype: str = "torch.uint8"


def keys(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    files: Mapping[str, str] | None = None,
    model: Mapping[str, Any] | None = None,
    hf_config: Mapping[str, Any] | None = None,
    original_max_model_len: int | None = None,
    speculation: str = "eagle",
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    default: bool = True,
    cache_dtype: str = "fp8_e4m3",
    hashes: str = "sha256_cbor",
    fp8: str = "float8_e4m3fn",
    version: str = "0.33.0",
    started_s: float | None = None,
    order: str = "LBHNC",
    v2: bool = False,
    spec: Mapping[str, Any] | None = None,
    layers: Sequence[str] = ("model.layers.0", "model.layers.1"),
    ranks: Mapping[str, int] | None = None,
    blocks_per_chunk: int = 1,
    row_nbytes: int = 4096,
) -> dict[str, str]:
    """Return the ids of an engine's two groups, and of a LoRA adapter's first group."""
    for name, text in {**_FILES, **(files or {})}.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    hf = SimpleNamespace(to_dict=lambda: dict(hf_config or {}))
    main = replace(_ModelConfig(hf_config=hf), **(model or {}))
    main.original_max_model_len = original_max_model_len  # type: ignore[attr-defined]
    draft = SimpleNamespace(
        model="draft", revision=None, hf_overrides={}, hf_config=hf, max_model_len=1
    )
    parallel = {"tp_size": 2, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, **(ranks or {})}
    world_size = parallel["tp_size"] * parallel["pp_size"]
    vllm_config = SimpleNamespace(
        model_config=main,
        load_config=SimpleNamespace(
            load_format="auto", model_loader_extra_config={}, download_dir=None
        ),
        attention_config=None,
        lora_config=_LoRAConfig({"audio": "adapter"}),
        speculative_config=_Speculation(speculation, draft),
        additional_config={},
        use_v2_model_runner=v2,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, prefix_caching_hash_algo=hashes),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=parallel["dcp_size"],
            prefill_context_parallel_size=parallel["pcp_size"],
            pipeline_parallel_size=parallel["pp_size"],
            world_size=world_size,
            distributed_executor_backend="mp",
        ),
    )
    specs = replace(_Spec(), **(spec or {})), _Spec(head_size=132)
    groups = [
        SimpleNamespace(kv_cache_spec=each, layer_names=[f"{layer}.{number}" for layer in layers])
        for number, each in enumerate(specs)
    ]
    cache = SimpleNamespace(
        num_blocks=1,
        kv_cache_tensors=[],
        prefix_cache_retention_interval=None,
        kv_cache_groups=groups,
    )
    device = SimpleNamespace(
        device_type="cuda",
        is_rocm=lambda: False,
        get_device_capability=lambda: SimpleNamespace(major=9, minor=0),
        fp8_dtype=lambda: f"torch.{fp8}",
    )
    tier = TierSettings.parse("vllm", {"backend": "memory", **(settings or {})})
    runtime = Runtime(version, device, started_s)
    offloading = SimpleNamespace(
        config=SimpleNamespace(
            groups=[
                SimpleNamespace(group_id=number, layer_names=group.layer_names, tokens_per_block=16)
                for number, group in enumerate(groups)
            ],
            cache=SimpleNamespace(blocks_per_chunk=blocks_per_chunk, tokens_per_hash=16),
            parallel=SimpleNamespace(
                world_size=world_size, is_parallelism_agnostic=False, **parallel
            ),
            model=SimpleNamespace(name="org/model", dtype="bfloat16"),
            kv_cache_layout=order,
            canonical_layout=False,
            replicated_layout=False,
        )
    )
    with monkeypatch.context() as patch:
        patch.chdir(place)
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        identity = identity_of(vllm_config, cache, tier, runtime, {_BMM: lambda: default})
        named = tier.model_copy(update={"identity": IdentitySettings.model_validate(identity)})
        spaces = spaces_of(offloading, row_nbytes, named, runtime)
        label = Adapter("later", 1e12).label(trusted=False)
    assert label
    adapter = of_adapter(spaces[0], label).id
    return {"kv": spaces[0].id, "indexer": spaces[1].id, "adapter": adapter}


def _files(*names: str, pools: Sequence[str] = ()) -> list[Pair]:
    return [Pair(other={"files": {name: '{"other": 1}'}}, pools=pools) for name in names]


_SHARED = {"share_between_releases": True}

SOURCES: Mapping[str, Sequence[Pair]] = {
    "name of the model": [Pair(other={"model": {"served_model_name": "org-model"}})],
    "weights": [
        *_files("model.safetensors", "consolidated.safetensors", "pytorch_model.bin"),
        Pair(other={"settings": {"weights": "org/model@2"}}),
    ],
    "code and configs of the model": _files(
        "config.json", "modeling_my.py", "preprocessor_config.json", "processor_config.json"
    ),
    "files that changed after they were loaded": [
        Pair(other={"started_s": 0.0}, refused=r"changed at .* was started.*start it again")
    ],
    "LoRA adapters of the launch": _files("adapter/adapter_model.bin"),
    "LoRA adapters that are loaded later": _files("later/adapter_model.bin", pools=["adapter"]),
    "draft model": [
        *_files("draft/model.safetensors"),
        Pair(other={"speculation": "eagle3"}),
    ],
    "arguments": [
        Pair(other={"model": {"quantization": "fp8"}}),
        Pair(other={"model": {"hf_overrides": {"rope_theta": 5.0}}}),
        Pair(other={"hashes": "sha256"}),
    ],
    "environment": [Pair(other={"environment": {"VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "1"}})],
    "effective values of defaults": [
        Pair(one={"settings": _SHARED}, other={"settings": _SHARED, "default": False}),
        Pair(
            one={"hf_config": _LONGROPE, "original_max_model_len": -1},
            other={"hf_config": _LONGROPE, "original_max_model_len": 4096},
        ),
    ],
    "platform": [
        Pair(other={"settings": {"platform": name}}) for name in ("cuda-sm100", "rocm-gfx942")
    ],
    "release of the engine": [Pair(other={"version": version}) for version in ("0.32.0", "0.33.1")]
    + [Pair(other={"settings": _SHARED})],
    "KV type": [
        Pair(other={"fp8": "float8_e4m3fnuz"}),
        Pair(other={"cache_dtype": "fp8_e5m2"}),
        Pair(other={"settings": {"kv_dtype": "fp8_ds_mla"}}),
    ],
    "byte order": [Pair(other={"order": "BLHNC"}), Pair(other={"v2": True})],
    "format of the engine's own pools": [Pair(other={"spec": {"dtype": "torch.bfloat16"}})],
    "size of a page": [
        Pair(other={"blocks_per_chunk": 2}),
        Pair(other={"row_nbytes": 8192}),
    ],
    "layers and heads": [
        Pair(other={"layers": ["model.layers.0"]}),
        Pair(other={"spec": {"num_kv_heads": 4}}),
        Pair(other={"ranks": {"tp_size": 4}}),
    ],
    "pipeline and context parallelism": [
        Pair(other={"ranks": {name: 2}}) for name in ("pp_size", "pcp_size", "dcp_size")
    ],
    "tenant": [Pair(other={"settings": {"tenant": "other"}})],
    "memory that another process maps": [],
}
