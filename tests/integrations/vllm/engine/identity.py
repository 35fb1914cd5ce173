"""Everything in vLLM's configs that the bytes of a row depend on is in the row's key space."""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import vllm_engine
from vllm_engine import (
    BLOCK,
    FULL,
    HEAD_SIZE,
    MODEL,
    PROMPT,
    Engine,
    Workers,
    config,
    interface,
    model_dir,
)

from hicache_storage.errors import ConfigError
from hicache_storage.integrations import vllm as adapter
from hicache_storage.integrations.vllm import _facts
from hicache_storage.integrations.vllm._variables import VARIABLES
from hicache_storage.keys import KeySpace

NEWEST = metadata.version("vllm").startswith("0.33.")
WEIGHTS = model_dir("weights")
(Path(WEIGHTS) / "model.safetensors").write_bytes(b"weights" * 1000)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the config of a store to which an engine with default settings has written."""
    fields = {"backend": "file", "config": {"path": str(tmp_path_factory.mktemp("pages"))}}
    with Engine(fields) as engine:
        engine.write(PROMPT)
    return fields


def edit(part: str, **fields: Any) -> Callable[[Any], None]:
    """Return a function that sets fields of a part of `VllmConfig` without its own checks."""

    def change(vllm_config: Any) -> None:
        record = getattr(vllm_config, part)
        for name, value in fields.items():
            if isinstance(record, dict):
                record[name] = value
            else:
                setattr(record, name, value)

    return change


def unchanged(hf_config: Any) -> Any:
    return hf_config


def set_speculation(vllm_config: Any) -> None:
    vllm_config.speculative_config = config.SpeculativeConfig(
        method="ngram", num_speculative_tokens=2, prompt_lookup_max=2
    )


CHANGES: dict[str, dict[str, Any]] = {
    "model": {"model": model_dir("other")},
    "served name": {"served_model_name": "another name"},
    "revision": {"revision": "0123abcd"},
    "code revision": {"code_revision": "0123abcd"},
    "dtype": {"dtype": "float16"},
    "kv dtype": {"kv_dtype": "fp8_e4m3"},
    "overrides": {"hf_overrides": {"rope_theta": 77777.0}},
    "callable overrides": {"hf_overrides": unchanged},
    "quantization": {"edit": edit("model_config", quantization="awq")},
    "weights elsewhere": {"edit": edit("model_config", model_weights="s3://bucket/weights")},
    "sliding window off": {"disable_sliding_window": True},
    "ranks": {"tp": 2},
    "window": {"window": 2 * BLOCK},
    "hashes": {"hash_algo": "sha256_cbor"},
    "retention": {"edit": edit("cache_config", prefix_cache_retention_interval=None)},
    "speculation": {"edit": set_speculation},
    "random weights": {"edit": edit("load_config", load_format="dummy")},
    "loader's config": {"edit": edit("load_config", model_loader_extra_config={"a": 1})},
    "platform's config": {"edit": edit("additional_config", a=1)},
    "an unknown field": {"edit": edit("model_config", model_impl="transformers")},
}
FIELDS: dict[str, dict[str, Any]] = {
    "tenant": {"tenant": "another"},
    "our revision": {"revision": "2"},
    "name of the weights": {"weights": "named"},
    "name of the type": {"kv_dtype": "something"},
    "chunk": {"blocks_per_chunk": 2},
    "platform": {"platform": "rocm-gfx942"},
    "releases": {"share_between_releases": True},
    "canonical": {"canonical_layout": True},
}


def reads(extra: dict[str, Any], **fields: Any) -> int | None:
    with Engine(extra, **fields) as engine:
        answer = engine.ask(PROMPT)
        assert answer.wrong == 0
        return answer.computed


@pytest.mark.skipif(not NEWEST, reason="the id has vLLM's version")
def test_a_default_launch_keeps_its_key_space(file_config: dict[str, Any]) -> None:
    """Stores outlive a release, so pages of this launch must be found under the same id."""
    with Engine(
        {**file_config, "weights": "w", "platform": "cuda-sm90"}, served_model_name="m"
    ) as engine:
        (space,) = engine.tier._groups.spaces.values()

    assert "62e429560dc7eacd26ad3778aa6ab2d5" == space.id


def test_nothing_changed_is_a_hit(written: dict[str, Any]) -> None:
    assert FULL == reads(written)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_engine_is_a_miss(written: dict[str, Any], name: str) -> None:
    assert 0 == reads(written, **CHANGES[name])


@pytest.mark.parametrize("name", FIELDS)
def test_a_change_of_the_config_is_a_miss(written: dict[str, Any], name: str) -> None:
    assert 0 == reads({**written, **FIELDS[name]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1"),
        ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", '{"weight_bits": 4}'),
        ("VLLM_MARLIN_INPUT_DTYPE", "int8"),
    ],
    ids=lambda text: text[:10],
)
def test_another_environment_is_a_miss(
    name: str, value: str, written: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)

    assert 0 == reads(written)


def test_an_environment_that_makes_no_difference_is_a_hit(
    written: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "0")

    assert FULL == reads(written)


VARIABLES_0_32 = {
    "VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS",
    "VLLM_ROCM_AITER_MLA_DCP_VERIFY",
    "VLLM_ROCM_MONO_DECODE",
    "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM",
    "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE",
    "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM",
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND",
    "VLLM_USE_RAY_WRAPPED_PP_COMM",
}


def registry() -> dict[str, Any]:
    return dict(importlib.import_module("vllm.envs").environment_variables)


def test_every_variable_of_vllm_is_classified_once() -> None:
    times = Counter(name for name, _, _ in VARIABLES.classified())

    assert set(registry()) - set(times) == set()
    assert [name for name, count in times.items() if count > 1] == []
    assert set(adapter.HiCacheConnector.variables) == registry().keys()


@pytest.mark.skipif(not NEWEST, reason="an older release lacks some")
def test_every_classified_variable_exists() -> None:
    assert registry().keys() | VARIABLES_0_32 == VARIABLES.known


def test_the_neutral_value_of_a_variable_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    neutral = {
        name: value
        for name, value in VARIABLES.entering.items()
        if value is not None and name in registry()  # None: every value enters
    }
    for name in neutral:
        monkeypatch.delenv(name, raising=False)

    assert {name: registry()[name]() for name in neutral} == neutral


MEDIA = {
    "language_model_only",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_method",
    "video_pruning_rate",
}


@pytest.mark.skipif(not NEWEST, reason="an older release lacks some")
def test_every_setting_of_media_is_classified() -> None:
    multimodal = importlib.import_module("vllm.config.multimodal").MultiModalConfig

    assert {field.name for field in fields(multimodal)} == _facts._MEDIA | MEDIA
    assert not _facts._MEDIA & MEDIA


@pytest.mark.skipif(not NEWEST, reason="an older release lacks some")
def test_every_setting_of_diffusion_is_known() -> None:
    diffusion = importlib.import_module("vllm.config.diffusion").DiffusionConfig

    assert {field.name for field in fields(diffusion)} == {"canvas_length", "max_denoising_steps"}


def media_facts(**settings: Any) -> dict[str, Any]:
    multimodal = importlib.import_module("vllm.config.multimodal").MultiModalConfig
    record = object.__new__(multimodal)  # without its checks, which need a GPU
    for field in fields(multimodal):
        setattr(record, field.name, _facts._default(field))
    for name, value in settings.items():
        setattr(record, name, value)
    return _facts._media(record)


def test_settings_of_media_that_change_kv_are_in_the_key() -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"video_pruning_rate": 0.5},
        {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
        {"mm_encoder_attn_dtype": "fp8"},
        {"mm_processor_kwargs": {"num_crops": 4}},
        {"media_io_kwargs": {"video": {"num_frames": 4}}},
        {"language_model_only": True},
    ]

    assert [media_facts(**each) for each in settings] == settings
    assert media_facts(skip_mm_profiling=True, mm_processor_cache_gb=0) == {}


def test_a_file_of_scales_is_in_the_key_with_its_bytes(tmp_path: Path) -> None:
    facts: list[dict[str, Any]] = []
    for place, scale in (("a", "1"), ("b", "1"), ("b", "2")):
        (tmp_path / place).write_text(scale)
        facts.append(media_facts(mm_encoder_fp8_scale_path=str(tmp_path / place)))

    assert facts[0] == facts[1] != facts[2]


def test_settings_of_diffusion_are_in_the_key(written: dict[str, Any]) -> None:
    diffusion = importlib.import_module("vllm.config.diffusion").DiffusionConfig

    def change(vllm_config: Any) -> None:
        vllm_config.diffusion_config = diffusion(canvas_length=32)

    assert 0 == reads(written, edit=change)


def test_adapters_of_media_are_in_the_key_with_their_weights() -> None:
    found: list[dict[str, Any]] = []
    adapter_dir = Path(model_dir("adapter"))
    for content in (b"one", b"two"):
        (adapter_dir / "adapter_model.bin").write_bytes(content * 4096)
        lora = importlib.import_module("vllm.config.lora").LoRAConfig(
            default_mm_loras={"audio": str(adapter_dir)}
        )
        found.append(_facts._lora(lora, config.LoadConfig()))

    assert found[0] != found[1]


def test_the_model_runner_is_in_the_key(
    written: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = config.VllmConfig.use_v2_model_runner.fget
    other = property(lambda self: not usual(self))

    def change(_: Any) -> None:  # vLLM checks a config when it is made: V2 needs Triton
        monkeypatch.setattr(config.VllmConfig, "use_v2_model_runner", other)

    assert 0 == reads(written, edit=change)


def test_a_partition_of_the_layers_is_in_the_key(
    file_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def manifests() -> list[Any]:
        with Engine(file_config, tp=2, edit=edit("parallel_config", pipeline_parallel_size=2)) as (
            engine
        ):
            return [space.manifest() for space in engine.tier._groups.spaces.values()]

    before = manifests()
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,1")

    assert before != manifests()


def test_things_that_make_no_difference_are_hits(written: dict[str, Any]) -> None:
    def change(vllm_config: Any) -> None:
        vllm_config.cache_config.gpu_memory_utilization = 0.5
        vllm_config.model_config.seed = 5
        vllm_config.model_config.hf_token = "a secret"  # noqa: S105 - that of a test

    more = {**written, "cpu_bytes_to_use": 1 << 21, "offload_prompt_only": False}

    assert FULL == reads(more, max_logprobs=5, edit=change)


def test_another_number_of_blocks_makes_no_difference(written: dict[str, Any]) -> None:
    """Hosts differ in the size of their memory."""
    assert FULL == reads(written, edit=edit("cache_config", num_gpu_blocks_override=100))


def test_equal_weights_under_another_path_are_hits(file_config: dict[str, Any]) -> None:
    copy = model_dir("copy")
    (Path(copy) / "model.safetensors").write_bytes(b"weights" * 1000)
    with Engine(file_config, model=WEIGHTS, served_model_name="m") as engine:
        engine.write(PROMPT)

    assert FULL == reads(file_config, model=copy, served_model_name="m")


def test_other_weights_under_one_name_are_misses(file_config: dict[str, Any]) -> None:
    tuned = model_dir("tuned")
    (Path(tuned) / "model.safetensors").write_bytes(b"tuned  " * 1000)
    with Engine(file_config, model=WEIGHTS, served_model_name="m") as engine:
        engine.write(PROMPT)

    assert 0 == reads(file_config, model=tuned, served_model_name="m")


def test_fields_of_a_group_are_in_the_key(file_config: dict[str, Any]) -> None:
    with Engine(file_config) as engine:
        vllm_config = engine.core.vllm_config
        kv_config = engine.connector._kv_cache_config
    facts = _facts.cache_facts(vllm_config, kv_config)
    (group,) = kv_config.kv_cache_groups
    spec = group.kv_cache_spec
    changes = [
        replace(group, layer_names=["another"]),
        replace(group, is_eagle_group=True),
        replace(group, kv_cache_spec=replace(spec, num_kv_heads=1)),
        replace(group, kv_cache_spec=replace(spec, head_size=8)),
        replace(group, kv_cache_spec=replace(spec, page_size_padded=1 << 20)),
        replace(
            group,
            kv_cache_spec=replace(spec, kv_quant_mode=interface.KVQuantMode.INT8_PER_TOKEN_HEAD),
        ),
    ]
    for changed in changes:
        other = replace(kv_config, kv_cache_groups=[changed])
        assert facts != _facts.cache_facts(vllm_config, other)
    (tensor,) = kv_config.kv_cache_tensors
    packed = replace(tensor, block_stride=10240, layer_stride=5120)
    other = replace(kv_config, kv_cache_tensors=[packed])
    assert facts != _facts.cache_facts(vllm_config, other)


def test_canonical_rows_do_not_depend_on_the_ranks(file_config: dict[str, Any]) -> None:
    """In this layout, rows have the same bytes for any number of ranks, as vLLM itself checks."""
    extra = {**file_config, "canonical_layout": True}

    def layouts(**fields: Any) -> list[str]:
        with Engine(extra, **fields) as engine:
            return [space.layout for space in engine.tier._groups.spaces.values()]

    (one,), (two,) = layouts(), layouts(tp=2)
    assert one == two
    assert "canonical" in one


def test_mtp_layers_are_a_group_of_the_key(file_config: dict[str, Any]) -> None:
    with Engine(file_config, window=BLOCK, edit=set_speculation) as engine:
        engine.write(PROMPT)
        pools = {space.pool for space in engine.tier._groups.spaces.values()}
    assert {"group_0.FullAttentionSpec", "group_1.SlidingWindowSpec"} == pools
    assert FULL == reads(file_config, window=BLOCK, edit=set_speculation)


# --- refusals
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_xxhash_is_refused(file_config: dict[str, Any], algorithm: str) -> None:
    with pytest.raises(ConfigError, match=r"xxhash.*sha256_cbor"):
        Engine(file_config, hash_algo=algorithm)


def test_several_nodes_are_refused(file_config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"2 nodes.*one node"):
        Engine(file_config, tp=2, edit=edit("parallel_config", nnodes=2))


def test_an_executor_that_may_span_nodes_is_refused_unless_it_does_not(
    file_config: dict[str, Any],
) -> None:
    ray = edit("parallel_config", distributed_executor_backend="ray")

    with pytest.raises(ConfigError, match=r"'ray'.*node.*single_node"):
        Engine(file_config, tp=2, edit=ray)
    with Engine({**file_config, "single_node": True}, tp=2, edit=ray) as engine:
        assert engine.write(PROMPT).finished


def test_an_unnamed_fp8_is_refused_and_a_named_one_is_not(file_config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"fp8.*--kv-cache-dtype fp8_e4m3.*kv_dtype"):
        Engine(file_config, kv_dtype="fp8")
    with Engine({**file_config, "kv_dtype": "float8_e4m3fn"}, kv_dtype="fp8") as engine:
        (space,) = engine.tier._groups.spaces.values()
        assert "float8_e4m3fn" == space.dtype


def test_a_tier_alone_needs_an_identity(file_config: dict[str, Any]) -> None:
    tier = {"type": "HiCacheTier", "module_path": "hicache_storage.integrations.vllm"}
    extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{**tier, **file_config}]}

    with pytest.raises(ConfigError, match=r"identity.*HiCacheConnector.*revision"):
        Engine(extra, connector="OffloadingConnector", module=None)


def test_a_tier_alone_gets_no_pages_of_xxhash(file_config: dict[str, Any]) -> None:
    tier = {"type": "HiCacheTier", "module_path": "hicache_storage.integrations.vllm"}
    own = {**tier, **file_config, "identity": {"revision": "1"}}
    extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [own]}

    with Engine(extra, connector="OffloadingConnector", module=None, hash_algo="xxhash") as engine:
        assert engine.write(PROMPT).finished
        assert engine.tier._metrics.errors > 0
        assert {} == {
            name: pages
            for name, pages in engine.tier._connection.runner.stats().items()
            if name.startswith("store_pages")
        }


def test_sha256_cbor_is_recommended_in_one_line(
    file_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def lines(algorithm: str) -> int:
        caplog.clear()
        with (
            caplog.at_level(logging.INFO, "vllm.hicache_storage"),
            Engine(file_config, hash_algo=algorithm),
        ):
            return sum("sha256_cbor is recommended" in line for line in caplog.messages)

    assert [1, 0] == [lines("sha256"), lines("sha256_cbor")]


def test_no_secret_is_in_the_log(
    file_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def change(vllm_config: Any) -> None:
        vllm_config.model_config.hf_token = "hush-1"  # noqa: S105 - that of a test
        vllm_config.additional_config["key"] = "hush-2"
        vllm_config.load_config.model_loader_extra_config = {"key": "hush-3"}

    with (
        caplog.at_level(logging.DEBUG, "vllm.hicache_storage"),
        Engine(file_config, edit=change),
    ):
        assert any("the identity of this engine's KV" in line for line in caplog.messages)
    assert "hush" not in caplog.text


class FittedWorkers(Workers):
    """Workers with little memory for KV."""

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if method == "determine_available_memory":
            return [22 * 10240] * self.ranks
        return super().collective_rpc(method, *args, **kwargs)


@pytest.mark.parametrize("form", ["nested", "as Phi-3"])
def test_a_fitted_length_is_not_the_length_that_longrope_was_built_for(
    form: str, file_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = {"short_factor": [1.0] * (HEAD_SIZE // 2), "long_factor": [4.0] * (HEAD_SIZE // 2)}
    original = {"original_max_position_embeddings": 512}
    inside, beside = (original, {}) if form == "nested" else ({}, original)
    scaling = {"rope_type": "longrope", **factors, **inside}
    path = model_dir("longrope", rope_scaling=scaling, **beside)
    monkeypatch.setattr(vllm_engine, "Workers", FittedWorkers)
    lengths: list[int] = []

    def space_of(max_model_len: int) -> KeySpace:
        with Engine(file_config, model=path, max_model_len=max_model_len) as engine:
            lengths.append(engine.core.vllm_config.model_config.max_model_len)
            space: KeySpace = engine.tier._groups.spaces[0]
            return space

    automatic = space_of(-1)
    assert lengths[0] < 512
    assert automatic == space_of(-1)
    assert automatic != space_of(lengths[0]) != space_of(lengths[0] - 16)


def test_data_parallel_replicas_share_pages(written: dict[str, Any]) -> None:
    replica = edit("parallel_config", data_parallel_index=1, data_parallel_rank_local=1)

    assert FULL == reads(written, edit=replica)


def test_the_model_is_named_as_it_is_served(file_config: dict[str, Any]) -> None:
    with Engine(file_config) as engine:
        (space,) = engine.tier._groups.spaces.values()
    assert MODEL == space.model
