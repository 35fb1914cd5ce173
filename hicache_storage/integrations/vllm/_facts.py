"""Collect the properties that the bytes of vLLM's KV depend on, from vLLM's configs.

Each config object is read as a whole, except for fields that KV does not depend on. Values that are
vLLM's defaults are left out. So a field that a later vLLM adds is included unless it has its default
value.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import logging
import os
from typing import TYPE_CHECKING, Any, cast

from hicache_storage.errors import ConfigError
from hicache_storage.integrations._weights import change_since, content_of, weights_at
from hicache_storage.integrations.vllm._settings import NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.integrations.vllm._settings import TierSettings

logger = logging.getLogger("vllm.hicache_storage")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The weights identify the model, and its name is a separate field.
_MODEL = _names(
    "model model_weights tokenizer tokenizer_mode tokenizer_revision trust_remote_code seed hf_config"
    " hf_text_config is_submodel_config word_embeddings_untied_by_checkpoint allowed_local_media_path"
    " allowed_media_domains max_model_len spec_target_max_model_len allow_deprecated_quantization"
    " enforce_eager return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay"
    " disable_cascade_attn skip_tokenizer_init enable_prompt_embeds served_model_name hf_token"
    " hf_overrides generation_config override_generation_config enable_sleep_mode"
    " sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph"
    " enable_nccl_comm_suspend enable_cumem_allocator logits_processors io_processor_plugin"
    " renderer_num_workers pooler_config multimodal_config"
)
_CACHE = _names(
    "block_size user_specified_block_size _block_size_resolved kv_cache_layout gpu_memory_utilization"
    " cache_dtype is_attention_free num_gpu_blocks_override enable_prefix_caching num_gpu_blocks"
    " num_cpu_blocks simple_cpu_offload_num_blocks effective_attention_block_size kv_cache_size_tokens"
    " kv_cache_max_concurrency kv_cache_memory_bytes kv_offloading_size kv_offloading_backend swap_space"
    " hash_block_size cache_hit_alignment_tokens prefix_caching_hash_algo"
    " prefix_cache_retention_interval"
)
_ATTENTION = _names(
    "flash_attn_version flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv"
    " tq_max_kv_splits_for_cuda_graph use_trtllm_attention mla_prefill_backend trtllm_ragged_backend"
    " indexer_tp_shard_min_rows sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n"
    " flex_attn_q_block_size flex_attn_kv_block_size"
)
_SPECULATION = _names(
    "enforce_eager model draft_load_config max_model_len target_model_config target_parallel_config"
    " draft_model_config draft_parallel_config num_speculative_tokens_per_batch_size"
    " rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length"
    " suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests"
    " suffix_decoding_max_spec_factor suffix_decoding_min_token_prob prompt_lookup_max"
    " prompt_lookup_min draft_sample_method enable_adaptive_verification moe_backend"
)
_LORA = _names(
    "max_lora_rank max_loras max_cpu_loras fully_sharded_loras specialize_active_lora"
    " max_lora_cls_labels"
)
# Limits, caches, transport and profiling of media, and kernels and ranks of media encoders.
_MEDIA = _names(
    "limit_per_prompt enable_mm_embeds mm_device_do_normalize mm_processor_cache_gb"
    " mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only"
    " mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_fp8_scale_save_path"
    " mm_encoder_fp8_scale_save_margin interleave_mm_strings skip_mm_profiling mm_tensor_ipc"
    " allow_missing_mm_embeddings mm_ipc_gpu_memory_gb"
)
# Formats that load the weights of the checkpoint unchanged.
_PLAIN_FORMATS = _names(
    "auto hf safetensors fastsafetensors instanttensor npcache pt mistral runai_streamer"
    " runai_streamer_sharded sharded_state"
)


def model_facts(
    vllm_config: Any, settings: TierSettings, started_s: float | None
) -> dict[str, Any]:
    """Return the facts about the weights, and about everything that changes how they are used.

    Args:
        vllm_config: vLLM's configs.
        settings: The tier's settings.
        started_s: When the process started that has loaded the weights, if that is known.

    Raises:
        ConfigError: The weights cannot be read, or have changed since the start.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    overrides = model.hf_overrides
    facts: dict[str, Any] = {
        **_set_fields(model, _MODEL),
        "weights": settings.weights or _weights(model, load, started_s),
        "overrides": _plain(model.hf_config.to_dict() if callable(overrides) else overrides),
        "attention": _set_fields(vllm_config.attention_config, _ATTENTION),
        "lora": _lora(vllm_config.lora_config, load, started_s),
        "mamba": _set_fields(getattr(vllm_config, "mamba_config", None), frozenset()),
        "media": _media(model.multimodal_config),
        "diffusion": _set_fields(getattr(vllm_config, "diffusion_config", None), frozenset()),
        "speculation": _speculation(vllm_config.speculative_config, load, started_s),
    }
    facts["additional"] = _digest(vllm_config.additional_config)
    facts["loader"] = _digest(load.model_loader_extra_config)
    if load.load_format not in _PLAIN_FORMATS:
        facts["load_format"] = [str(load.load_format), model.seed]
    facts["max_model_len"] = _rope_length(model)
    return {name: value for name, value in facts.items() if value}


def cache_facts(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """Return the facts about the cache: hashes, retention, and the layers of every group."""
    cache = vllm_config.cache_config
    tensors = [
        _tensor_facts(tensor, kv_cache_config.num_blocks)
        for tensor in kv_cache_config.kv_cache_tensors
    ]
    return {
        **_set_fields(cache, _CACHE),
        "hashes": str(cache.prefix_caching_hash_algo),
        "retention": kv_cache_config.prefix_cache_retention_interval,
        "groups": [_group_facts(group) for group in kv_cache_config.kv_cache_groups],
        "tensors": tensors,
        "host_stride": getattr(kv_cache_config, "hisparse_host_block_stride", None),
    }


def rank_facts(vllm_config: Any, executor: str) -> dict[str, Any]:
    """Return the facts about ranks that a tier cannot see."""
    parallel = vllm_config.parallel_config
    facts: dict[str, Any] = {
        name: getattr(parallel, name, 1)
        for name in ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size")
        if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
    }
    if parallel.pipeline_parallel_size > 1:
        facts["partition"] = os.environ.get("VLLM_PP_LAYER_PARTITION", "")
    if parallel.world_size > 1:
        facts["executor"] = executor
    return facts


# --- parts
# -------------------------------------------------------------------------------------------


def _set_fields(record: Any, ignored: frozenset[str]) -> dict[str, Any]:
    """Return the fields of a config that differ from their defaults, except for `ignored`."""
    if record is None or not dataclasses.is_dataclass(record):
        return {}
    found: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        if field.name not in ignored:
            value = getattr(record, field.name, None)
            if value is not None and value != _default(field):
                found[field.name] = _plain(value)
    return found


def _default(field: Any) -> Any:
    default = field.default
    if hasattr(default, "get_default"):  # a pydantic field
        return default.get_default(call_default_factory=True)
    if default is not dataclasses.MISSING:
        return default
    factory = field.default_factory
    return None if factory is dataclasses.MISSING else factory()


def _plain(value: Any) -> Any:
    """Convert a value to JSON types. Equal configs give equal results in each process."""
    if isinstance(value, enum.Enum):
        return str(value.name)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _set_fields(value, frozenset())
    if isinstance(value, dict):
        items = cast("Any", value).items()
        return {str(key): _plain(each) for key, each in items}
    if isinstance(value, (list, tuple, set, frozenset)):
        plain = [_plain(each) for each in cast("list[Any]", value)]
        return plain if isinstance(value, (list, tuple)) else sorted(map(str, plain))
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def _group_facts(group: Any) -> dict[str, Any]:
    spec = group.kv_cache_spec
    facts = _set_fields(group, frozenset({"layer_names", "kv_cache_spec"}))
    return {**facts, "layers": list(group.layer_names), "spec": _spec_facts(spec)}


def _spec_facts(spec: Any) -> dict[str, Any]:
    nested: Mapping[str, Any] | None = getattr(spec, "kv_cache_specs", None)
    facts = _set_fields(spec, frozenset({"kv_cache_specs", "non_causal"}))
    if nested:
        facts["specs"] = {name: _spec_facts(each) for name, each in nested.items()}
    return {"kind": type(spec).__name__, **facts}


def _tensor_facts(tensor: Any, blocks: int) -> dict[str, Any]:
    """Return where a block has a tensor's layers. The result does not depend on the number of blocks."""
    block, layer = tensor.block_stride, tensor.layer_stride
    outer = "block" if layer < block else "layer"
    facts = {"layers": list(tensor.layers), "outer": outer, "block_stride": block}
    facts["nbytes"] = tensor.size // max(1, blocks)
    return {**facts, "offset": tensor.offset} if outer == "block" else facts


def _lora(config: Any, load: Any, started_s: float | None = None) -> dict[str, Any]:
    """Return the settings of LoRA. Block hashes cover names and paths of adapters, not their content."""
    facts = _set_fields(config, _LORA)
    if adapters := facts.get("default_mm_loras"):
        facts["default_mm_loras"] = [
            [name, path, _fingerprint(path, None, load, started_s)]
            for name, path in sorted(adapters.items())
        ]
    return facts


def _media(config: Any) -> dict[str, Any]:
    facts = _set_fields(config, _MEDIA)
    if scales := facts.get("mm_encoder_fp8_scale_path"):
        facts["mm_encoder_fp8_scale_path"] = content_of(scales)
    return facts


def _speculation(config: Any, load: Any, started_s: float | None) -> dict[str, Any]:
    if config is None:
        return {}
    facts = _set_fields(config, _SPECULATION)
    draft = getattr(config, "draft_model_config", None)
    if draft is not None and hasattr(draft, "hf_overrides"):
        facts["weights"] = _weights(draft, load, started_s)
        facts["max_model_len"] = _rope_length(draft)
    return facts


def _weights(model: Any, load: Any, started_s: float | None) -> str:
    path = str(getattr(model, "model_weights", "") or model.model)
    return _fingerprint(path, model.revision, load, started_s)


def _fingerprint(path: str, revision: str | None, load: Any, started_s: float | None) -> str:
    change = ""
    try:
        fingerprint = weights_at(path, revision, load.download_dir)
        if started_s is not None:
            downloads = not os.path.isdir(path)  # noqa: PTH112 - `~` is not expanded
            change = change_since(started_s, path, revision, load.download_dir, downloads=downloads)
    except OSError as error:
        raise ConfigError(
            f"{NAME}: the weights at {path} cannot be read: {error.strerror}. Make them readable, or"
            ' name them with "weights": "..." in kv_connector_extra_config'
        ) from error
    if change:
        raise ConfigError(
            f"{NAME}: {change}, after the engine was started, so it may have loaded other weights:"
            ' start it again, or name what it has loaded with "weights": "..." in'
            " kv_connector_extra_config"
        )
    if fingerprint:
        return fingerprint
    logger.warning(
        "no weights were found at %s: only this name and --revision identify them. Name them with"
        ' "weights": "..." in kv_connector_extra_config if they may change under it',
        path,
    )
    return f"named:{path}"


def _digest(value: Any) -> str:
    """Return a digest of a value that may hold secrets. Return "" if there is no value."""
    if not value:
        return ""
    text = json.dumps(_plain(value), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _rope_length(model: Any) -> int | str | None:
    """Return the maximum length that decides the rotary factors (longrope), or None if none does.

    With `--max-model-len auto` vLLM builds the model for its full length, and later replaces
    `max_model_len` by what fits into memory. So only "auto" says what the model was built for.
    """
    if "longrope" not in json.dumps(_plain(model.hf_config.to_dict()), default=str):
        return None
    automatic = getattr(model, "original_max_model_len", None) == -1
    return "auto" if automatic else int(model.max_model_len)
