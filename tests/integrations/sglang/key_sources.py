"""The sources of SGLang's key spaces, each with pairs of servers that differ in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from key_sources import Pair

from hicache_storage.integrations.sglang._identity import Identity
from hicache_storage.integrations.sglang._launch import LaunchIdentity
from hicache_storage.integrations.sglang._settings import AdapterSettings

NAME = "SGLang"

_CONFIG = {
    "model_name": "org/model",
    "tp_rank": 0,
    "tp_size": 4,
    "pp_rank": 0,
    "pp_size": 1,
    "attn_cp_rank": 0,
    "attn_cp_size": 1,
}
_FILES = {
    "config.json": json.dumps({"rope_theta": 1e6, "auto_map": {"AutoModel": "modeling_my.M"}}),
    "modeling_my.py": "INTERLEAVED = False",
    "preprocessor_config.json": json.dumps({"resample": 3}),
    "model.safetensors": "weights",
    "consolidated.safetensors": "the same weights",
    "adapter/adapter_model.bin": "adapter",
    "draft/model.safetensors": "draft",
}
_TOPK = "SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ"


def keys(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    files: Mapping[str, str] | None = None,
    arguments: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    pool: Mapping[str, Any] | None = None,
    fp8: str = "float8_e4m3fn",
    index_key_order: str = "",
    device_order: str = "nhd",
    page_tokens: int = 64,
    page_nbytes: int = 4096,
    version: str = "0.5.23",
    loaded_at_s: float | None = None,
) -> dict[str, str]:
    """Return the ids of a server's fp8 KV, index keys and KV of a draft model."""
    for name, text in {**_FILES, **(files or {})}.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    given = {"device": "cuda", "kv_cache_dtype": "fp8_e4m3", **(arguments or {})}
    # Paths of adapters enter the key, so those of all servers are equal.
    given |= {
        "model_path": ".",
        "lora_paths": ["a=adapter"],
        "speculative_draft_model_path": "draft",
    }
    device = _namespace({"dtype": f"torch.{fp8}", "kv_cache_layout": device_order})
    fields = {"layout": "page_first", "layer_num": 2, "start_layer": 0, "device_pool": device}
    kv = _namespace({"dtype": "torch.uint8", "head_num": 2, **fields, **(pool or {})})
    indexer = _namespace({"dtype": "torch.bfloat16", **fields, **(pool or {})})
    with monkeypatch.context() as patch:
        patch.chdir(place)
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        launch = LaunchIdentity(
            given,
            AdapterSettings.parse("sglang", {"platform": "cuda-sm90", **(settings or {})}),
            variables={_TOPK: "", **(defaults or {})},
            version=version,
            loaded_at_s=loaded_at_s,
        )
        identity = Identity(
            config=_namespace({**_CONFIG, **(config or {})}),
            launch=launch,
            tenant=str((settings or {}).get("tenant", "")),
            page_tokens=page_tokens,
            replicated=False,
            index_key_order=lambda: index_key_order,
        )
        return {
            name: identity.spaces(name, host, page_nbytes, 1)[0].id
            for name, host in (("kv", kv), ("indexer", indexer), ("draft", kv))
        }


def _namespace(fields: Mapping[str, Any]) -> Any:
    return SimpleNamespace(**fields)


def _files(*names: str) -> list[Pair]:
    return [Pair(other={"files": {name: '{"other": 1}'}}) for name in names]


SOURCES: Mapping[str, Sequence[Pair]] = {
    "name of the model": [Pair(other={"config": {"model_name": "org-model"}})],
    "weights": [
        *_files("model.safetensors", "consolidated.safetensors", "pytorch_model.bin"),
        Pair(other={"settings": {"weights": "org/model@2"}}),
    ],
    "code and configs of the model": _files(
        "config.json", "modeling_my.py", "preprocessor_config.json", "processor_config.json"
    ),
    "files that changed after they were loaded": [
        Pair(other={"loaded_at_s": 0.0}, refused=r"changed at .* was started.*restart the server")
    ],
    "LoRA adapters of the launch": _files("adapter/adapter_model.bin"),
    "LoRA adapters that are loaded later": [],
    "draft model": [
        Pair(other={"settings": {"draft_model": "org/draft@2"}}, pools=["draft"]),
        Pair(other={"arguments": {"speculative_algorithm": "EAGLE3"}}, pools=["draft"]),
    ],
    "arguments": [
        Pair(other={"arguments": {name: value}})
        for name, value in {
            "quantization": "fp8",
            "context_length": 1 << 20,
            "json_model_override_args": '{"rope_theta": 5}',
            "load_format": "dummy",
            "of_tomorrow": 1,
        }.items()
    ],
    "environment": [Pair(other={"environment": {"SGLANG_FP8_IGNORED_LAYERS": "k_proj"}})],
    "effective values of defaults": [
        Pair(
            one={"defaults": {_TOPK: "2"}, "settings": {"share_between_releases": True}},
            other={"defaults": {_TOPK: "1"}, "settings": {"share_between_releases": True}},
        )
    ],
    "platform": [
        Pair(other={"settings": {"platform": name}}) for name in ("cuda-sm100", "rocm-gfx942")
    ],
    "release of the engine": [
        Pair(other={"version": version}) for version in ("0.5.22", "0.5.23.post1")
    ],
    "KV type": [
        Pair(other={"fp8": "float8_e4m3fnuz"}, pools=["kv", "draft"]),
        Pair(other={"pool": {"dtype": "torch.bfloat16"}}, pools=["kv", "draft"]),
        Pair(other={"arguments": {"kv_cache_dtype": "mxfp8"}}, pools=["kv", "draft"]),
    ],
    "byte order": [
        Pair(other={"pool": {"layout": "page_first_direct"}}),
        Pair(other={"device_order": "hnd"}),
    ],
    "format of the engine's own pools": [
        Pair(other={"index_key_order": "tiles"}, pools=["indexer"]),
        Pair(other={"pool": {"dtype": "torch.float16"}}, pools=["indexer"]),
    ],
    "size of a page": [Pair(other={"page_tokens": 32}), Pair(other={"page_nbytes": 8192})],
    "layers and heads": [
        Pair(other={"pool": {"start_layer": 2}}),
        Pair(other={"pool": {"mtp_draft_buffer_infos": (1,)}}),
        Pair(other={"config": {"tp_rank": 1}}),
        Pair(
            one={"pool": {"head_num": 1}, "config": {"tp_rank": 2}},
            other={"pool": {"head_num": 1}, "config": {"tp_rank": 2, "tp_size": 8}},
        ),
    ],
    "pipeline and context parallelism": [
        Pair(other={"config": {"pp_size": 2, "pp_rank": 1}}),
        Pair(other={"config": {"attn_cp_size": 2}}),
        Pair(
            one={"config": {"attn_cp_size": 2}},
            other={"config": {"attn_cp_size": 2, "attn_cp_rank": 1}},
        ),
    ],
    "tenant": [Pair(other={"settings": {"tenant": "other"}})],
    "memory that another process maps": [],
}
