"""What the extra config says to the adapter, and what to the backend. Needs no SGLang."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_storage.errors import ConfigError
from hicache_storage.integrations.sglang._launch import Launch
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


def test_fields_under_config_win() -> None:
    extra = {**FACTORY, "url": "redis://x", "prefix": "a", "config": {"url": "redis://y"}}

    assert {"url": "redis://y", "prefix": "a"} == split_config(extra)[2]


def test_the_adapters_own_fields_are_kept_apart() -> None:
    _, settings, fields = split_config({**FACTORY, "adapter": {"tenant": "t", "timeout_s": 3}})

    assert (settings.tenant, settings.timeout_s, fields) == ("t", 3, {})


def test_what_the_user_wrote_is_not_changed() -> None:
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


def test_nothing_configured_names_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="backend_name"):
        split_config(None)


def test_arguments_that_say_nothing_leave_no_trace_in_the_revision() -> None:
    silent = {"weight_version": "default", "json_model_override_args": "{}", "dtype": "auto"}

    assert not Launch(silent, AdapterSettings()).revision(draft=False)


def test_arguments_that_change_kv_are_in_the_revision() -> None:
    told = {"revision": "abc", "quantization": "fp8", "json_model_override_args": '{"a": 1}'}
    launch = Launch(told, AdapterSettings(revision="mine"))

    expected = 'mine;revision=abc;quantization=fp8;json_model_override_args={"a": 1}'
    assert expected == launch.revision(draft=False)


def test_a_draft_adds_its_model() -> None:
    told = {"speculative_draft_model_path": "org/d", "speculative_draft_model_revision": "r"}

    expected = "draft=org/d;speculative_draft_model_revision=r"
    assert expected == Launch(told, AdapterSettings()).revision(draft=True)


def test_a_draft_of_no_known_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_model"):
        Launch({}, AdapterSettings()).revision(draft=True)


@pytest.mark.parametrize(
    ("told", "expected"),
    [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")],
)
def test_kv_that_is_kept_as_bytes_has_its_logical_type(told: str, expected: str) -> None:
    pytest.importorskip("torch")

    assert expected == Launch({"kv_cache_dtype": told}, AdapterSettings()).byte_kv_dtype("kv")


def test_a_draft_may_have_a_type_of_its_own() -> None:
    told = {"kv_cache_dtype": "fp8_e4m3", "speculative_draft_kv_cache_dtype": "bf16"}
    launch = Launch(told, AdapterSettings())

    assert ("fp8_e4m3", "bf16") == (launch.kv_label("kv"), launch.kv_label("draft"))


def test_kv_as_bytes_of_no_known_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv-cache-dtype.*float8_e4m3fn"):
        Launch({}, AdapterSettings()).byte_kv_dtype("kv")
