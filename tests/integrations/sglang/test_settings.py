"""The extra config and the launch arguments, tested without SGLang."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_storage.errors import ConfigError
from hicache_storage.integrations.sglang import _launch
from hicache_storage.integrations.sglang._identity import Identity
from hicache_storage.integrations.sglang._launch import LaunchIdentity
from hicache_storage.integrations.sglang._settings import AdapterSettings, split_config

FACTORY = {
    "backend_name": "redis",
    "module_path": "hicache_storage.integrations.sglang",
    "class_name": "SGLangHiCacheStorage",
    "interface_v1": 1,
}


def test_fields_beside_sglangs_are_the_backends() -> None:
    name, _, fields = split_config({**FACTORY, "url": "redis://x", "prefetch_threshold": 1})

    assert (name, fields) == ("redis", {"url": "redis://x"})


def test_the_tiers_of_a_composition_are_the_backends() -> None:
    tiers = [{"name": "ram", "backend": "memory"}]

    name, _, fields = split_config({**FACTORY, "backend_name": "tiered", "tiers": tiers})

    assert (name, fields) == ("tiered", {"tiers": tiers})


def test_fields_under_config_win() -> None:
    extra = {**FACTORY, "url": "redis://x", "prefix": "a", "config": {"url": "redis://y"}}

    assert {"url": "redis://y", "prefix": "a"} == split_config(extra)[2]


def test_the_adapters_own_fields_are_kept_apart() -> None:
    _, settings, fields = split_config({**FACTORY, "adapter": {"tenant": "t", "timeout_s": 3}})

    assert (settings.tenant, settings.timeout_s, fields) == ("t", 3, {})


def test_the_users_config_is_not_changed() -> None:
    extra: dict[str, Any] = {**FACTORY, "config": {"url": "u"}, "adapter": {"tenant": "t"}}
    before = {**extra}
    split_config(extra)

    assert before == extra


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backend_name": None}, "backend_name: this field is required"),
        (
            {"adapter": {"tenent": "x"}},
            "sglang.adapter: unknown field 'tenent'; did you mean 'tenant'",
        ),
        ({"adapter": {"checksum": "crc"}}, "sglang.adapter: checksum"),
        ({"adapter": []}, "adapter: must be an object, not list"),
        ({"config": "x"}, "config: must be an object, not str"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_config({**FACTORY, **fields})


def test_a_missing_config_names_the_missing_field() -> None:
    with pytest.raises(ConfigError, match="backend_name"):
        split_config(None)


def test_neutral_arguments_are_not_in_the_revision() -> None:
    neutral = {"weight_version": "default", "json_model_override_args": "{}", "dtype": "auto"}

    assert not LaunchIdentity(neutral, AdapterSettings()).revision(draft=False)


def test_arguments_that_change_kv_are_in_the_revision() -> None:
    arguments = {"revision": "abc", "quantization": "fp8", "json_model_override_args": '{"a": 1}'}
    launch = LaunchIdentity(arguments, AdapterSettings(revision="mine"))

    expected = 'mine;revision=abc;quantization=fp8;json_model_override_args={"a": 1}'
    assert expected == launch.revision(draft=False)


def test_a_draft_adds_its_model() -> None:
    arguments = {"speculative_draft_model_path": "org/d", "speculative_draft_model_revision": "r"}

    expected = "draft=org/d;speculative_draft_model_revision=r"
    assert expected == LaunchIdentity(arguments, AdapterSettings()).revision(draft=True)


def test_a_draft_in_another_revision_of_the_targets_repository_has_its_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fingerprint(path: str, revision: str | None, _: str | None) -> str:
        return f"{path}-at-{revision}"

    monkeypatch.setattr(_launch, "weights_at", fingerprint)
    arguments = {"model_path": "org/m", "speculative_draft_model_path": "org/m"}
    launch = LaunchIdentity(
        {**arguments, "speculative_draft_model_revision": "mtp"}, AdapterSettings()
    )

    assert "weights=org/m-at-None" in launch.revision(draft=False)
    assert launch.revision(draft=True).endswith("draft_weights=org/m-at-mtp")


def test_a_draft_of_no_known_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_model"):
        LaunchIdentity({}, AdapterSettings()).revision(draft=True)


@pytest.mark.parametrize(
    ("label", "device_dtype", "expected"),
    [
        ("fp8_e4m3", "float8_e4m3fn", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fnuz", "float8_e4m3fnuz"),  # the same flag on an MI300
        ("fp8_e5m2", "float8_e4m3fnuz", "float8_e4m3fnuz"),  # SGLang's choice on ROCm
        ("auto", "float8_e5m2", "float8_e5m2"),
        ("mxfp8", "float8_e4m3fn", "mxfp8-float8_e4m3fn"),
        ("fp8_e4m3", "", "float8_e4m3fn"),  # SGLang 0.5.23 does not show the pool on the device
        ("fp8_e5m2", "", "float8_e5m2"),
    ],
)
def test_kv_that_is_kept_as_bytes_has_the_type_that_the_device_computes_with(
    label: str, device_dtype: str, expected: str
) -> None:
    launch = LaunchIdentity({"kv_cache_dtype": label}, AdapterSettings(dtype="float8_other"))

    assert expected == launch.byte_kv_dtype("kv", device_dtype)


def test_a_draft_may_have_a_type_of_its_own() -> None:
    arguments = {"kv_cache_dtype": "fp8_e4m3", "speculative_draft_kv_cache_dtype": "bf16"}
    launch = LaunchIdentity(arguments, AdapterSettings())

    assert ("fp8_e4m3", "bf16") == (launch.kv_label("kv"), launch.kv_label("draft"))


@pytest.mark.parametrize(("label", "device_dtype"), [("auto", ""), ("nvfp4", "float4_e2m1fn_x2")])
def test_kv_as_bytes_of_no_known_type_is_refused_unless_it_is_named(
    label: str, device_dtype: str
) -> None:
    arguments = {"kv_cache_dtype": label}
    with pytest.raises(ConfigError, match=r"kv-cache-dtype.*float8_e4m3fn"):
        LaunchIdentity(arguments, AdapterSettings()).byte_kv_dtype("kv", device_dtype)
    launch = LaunchIdentity(arguments, AdapterSettings(dtype="float4_mine"))

    assert launch.byte_kv_dtype("kv", device_dtype) == "float4_mine"


def test_scale_files_with_other_factors_are_other_identities(tmp_path: Path) -> None:
    revisions: set[str] = set()
    for factor in (0.5, 0.25, 0.5):
        scales = tmp_path / f"{len(revisions)}.json"
        scales.write_text(json.dumps({"kv_cache": {"scaling_factor": factor}}))
        launch = LaunchIdentity({"quantization_param_path": str(scales)}, AdapterSettings())
        revisions.add(launch.revision(draft=False))

    assert len(revisions) == 2


def test_a_scale_file_that_cannot_be_read_is_another_identity_than_none(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.json")
    launch = LaunchIdentity({"quantization_param_path": absent}, AdapterSettings())

    assert f"quantization_param_path=unread:{absent}" == launch.revision(draft=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [("load_format", "dummy"), ("context_length", 1_048_576), ("hisparse_config", {"top_k": 8})],
)
def test_an_argument_that_changes_kv_is_in_the_revision(name: str, value: object) -> None:
    assert name in LaunchIdentity({name: value}, AdapterSettings()).revision(draft=False)


def test_another_way_to_load_the_same_weights_is_the_same_identity() -> None:
    for load_format in ("auto", "safetensors", "runai_streamer", "remote_instance"):
        launch = LaunchIdentity({"load_format": load_format}, AdapterSettings())
        assert not launch.revision(draft=False)


def test_an_unclassified_argument_is_in_the_revision_unless_it_has_its_default() -> None:
    arguments = {"rope_of_tomorrow": "ntk", "port_of_tomorrow": 7}
    launch = LaunchIdentity(
        arguments, AdapterSettings(), {"rope_of_tomorrow": None, "port_of_tomorrow": 7}
    )

    assert launch.revision(draft=False) == "rope_of_tomorrow=ntk"


@pytest.mark.parametrize(
    ("default", "value"), [(True, False), (8, 0), ("fp8", ""), ([4], []), (None, 0), (None, "")]
)
def test_a_falsy_value_that_is_not_the_default_is_in_the_revision(
    default: object, value: object
) -> None:
    launch = LaunchIdentity({"of_tomorrow": value}, AdapterSettings(), {"of_tomorrow": default})

    assert (
        launch.revision(draft=False) == f"of_tomorrow={value or json.dumps(value).strip(chr(34))}"
    )


def test_no_experts_on_the_gpu_is_another_identity_than_the_default() -> None:
    launch = LaunchIdentity({"kt_num_gpu_experts": 0}, AdapterSettings())

    assert launch.revision(draft=False) == "kt_num_gpu_experts=0"


def test_the_values_that_sglang_gives_a_default_launch_are_neutral() -> None:
    resolved: dict[str, Any] = {"mm_process_config": {}, "enable_decoder_swa_bounded_replay": False}

    assert not LaunchIdentity(resolved, AdapterSettings()).revision(draft=False)


@pytest.mark.parametrize(
    "name", ["kt_weight_path", "dllm_algorithm_config", "modelopt_checkpoint_restore_path"]
)
def test_a_file_that_changes_kv_is_known_by_its_content(name: str, tmp_path: Path) -> None:
    revisions: list[str] = []
    for content in ("one", "two"):
        (tmp_path / "file").write_text(content)
        launch = LaunchIdentity({name: str(tmp_path / "file")}, AdapterSettings())
        revisions.append(launch.revision(draft=False))

    assert revisions[0] != revisions[1]


def test_weights_can_be_named(tmp_path: Path) -> None:
    launch = LaunchIdentity(
        {"model_path": str(tmp_path)}, AdapterSettings(weights="llama-3.1-8b@v2")
    )

    assert launch.revision(draft=False) == "weights=llama-3.1-8b@v2"


def test_weights_that_are_not_on_this_machine_are_known_by_their_path() -> None:
    launch = LaunchIdentity({"model_path": "s3://models/llama"}, AdapterSettings())

    assert launch.revision(draft=False) == "weights=named:s3://models/llama"


def test_adapters_that_swap_their_weights_are_another_identity(tmp_path: Path) -> None:
    revisions: list[str] = []
    for contents in ((b"one", b"two"), (b"two", b"one"), (b"one", b"one")):
        for name, content in zip("ab", contents, strict=True):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "adapter_model.bin").write_bytes(content * 4096)
        entries = [f"{name}={tmp_path / name}" for name in "ab"]
        launch = LaunchIdentity({"lora_paths": entries}, AdapterSettings())
        revisions.append(launch.revision(draft=False))

    assert len(set(revisions)) == 3


@pytest.mark.parametrize("entry_of", [dict, SimpleNamespace])
def test_adapters_are_bound_to_their_names_in_every_form(entry_of: Any) -> None:
    record = entry_of(lora_name="a", lora_path="/absent", lora_id="1")

    assert LaunchIdentity({"lora_paths": [record]}, AdapterSettings()).revision(
        draft=False
    ) == LaunchIdentity({"lora_paths": ["a=/absent"]}, AdapterSettings()).revision(draft=False)


def _identity(launch: LaunchIdentity) -> Identity:
    place = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
    config: Any = SimpleNamespace(
        **place, attn_cp_rank=0, attn_cp_size=1, model_name="m", is_mla_model=False
    )
    return Identity(config=config, launch=launch, tenant="", page_tokens=4, replicated=False)


def test_a_default_launch_keeps_its_key_spaces() -> None:
    """Stores outlive a release, so the pages of these launches must be found under the same ids."""
    launch = LaunchIdentity(
        {"weight_version": "default", "mm_process_config": {}},
        AdapterSettings(weights="w", platform="cuda-sm90"),
        version="0.5.23+cu129",
    )
    kv: Any = SimpleNamespace(
        layout="page_first", dtype="torch.bfloat16", head_num=2, layer_num=1, start_layer=0
    )
    mamba: Any = SimpleNamespace(
        layout="page_first",
        dtype="torch.bfloat16",
        temporal_dtype="torch.float32",
        num_mamba_layers=2,
    )
    ids = [
        space.id
        for name, pool in (("kv", kv), ("mamba", mamba))
        for space in _identity(launch).spaces(name, pool, 64, 1)
    ]

    assert ids == ["42858f8859c9bf32a5431a31cd630d91", "b3138d914cba4f4aecda190aab2bc709"]


def test_the_temporal_states_of_mamba_have_their_type_in_the_key() -> None:
    dtypes: list[str] = []
    for temporal in ("float32", "bfloat16", "float16"):
        pool: Any = SimpleNamespace(
            layout="page_first",
            dtype="torch.bfloat16",
            temporal_dtype=f"torch.{temporal}",
            num_mamba_layers=2,
        )
        launch = LaunchIdentity({}, AdapterSettings(platform="cuda-sm90"))
        dtypes += [space.dtype for space in _identity(launch).spaces("mamba", pool, 64, 1)]

    assert dtypes == ["bfloat16", "bfloat16+bfloat16", "bfloat16+float16"]


def test_another_order_of_heads_in_device_memory_is_another_identity() -> None:
    identity = _identity(LaunchIdentity({}, AdapterSettings(platform="cuda-sm90")))
    layouts: list[str] = []
    for order in (None, "nhd", "hnd", "vectorized_5d"):
        pool: Any = SimpleNamespace(
            layout="page_first", dtype="torch.bfloat16", head_num=2, layer_num=1, start_layer=0
        )
        pool.device_pool = SimpleNamespace(kv_cache_layout=order)
        layouts += [space.layout for space in identity.spaces("kv", pool, 64, 1)]

    assert layouts == [
        *["page_first+platform=cuda-sm90"] * 2,
        "page_first+device=hnd+platform=cuda-sm90",
        "page_first+device=vectorized_5d+platform=cuda-sm90",
    ]


def test_releases_share_pages_only_if_the_operator_says_so() -> None:
    defaults = {"SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ": "1", "SGLANG_MAMBA_SSM_DTYPE": ""}
    keys: dict[bool, set[tuple[str, ...]]] = {False: set(), True: set()}
    for share, sharing in keys.items():
        settings = AdapterSettings(platform="cuda-sm90", share_between_releases=share)
        for version in ("0.5.22", "0.5.23"):
            launch = LaunchIdentity({}, settings, variables=defaults, version=version)
            sharing.add((launch.revision(draft=False), *launch.made_by("cuda")))

    assert keys[True] == {("SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ=1", "platform=cuda-sm90")}
    assert keys[False] == {
        ("", "platform=cuda-sm90", "sglang=0.5.22"),
        ("", "platform=cuda-sm90", "sglang=0.5.23"),
    }


def test_a_file_that_changed_after_the_start_is_refused_by_name(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    arguments = {"quantization_param_path": str(scales)}
    loaded_at_s = scales.stat().st_ctime
    late = LaunchIdentity(arguments, AdapterSettings(), loaded_at_s=loaded_at_s - 1)

    assert LaunchIdentity(arguments, AdapterSettings(), loaded_at_s=loaded_at_s).revision(
        draft=False
    )
    with pytest.raises(ConfigError, match=rf"{scales} changed at .* restart the server"):
        late.revision(draft=False)


def test_named_weights_may_have_changed(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("new")
    launch = LaunchIdentity(
        {"model_path": str(tmp_path)}, AdapterSettings(weights="old"), loaded_at_s=0
    )

    assert launch.revision(draft=False) == "weights=old"
