"""The fields of the adapter in vLLM's extra config."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache_storage.errors import ConfigError
from hicache_storage.integrations.vllm import _settings

REDIS = {"backend": "redis", "config": {"url": "redis://cache/0"}}


def test_our_fields_move_to_a_tier_behind_the_listed_ones() -> None:
    fs = {"type": "fs", "root_dir": "/nvme"}
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": 1 << 30,
        "secondary_tiers": [fs],
        "tenant": "a",
        **REDIS,
    }

    (ours,) = _settings.complete_tiers(extra)

    tier = {"type": "HiCacheTier", "module_path": _settings.MODULE, "tenant": "a", **REDIS}
    assert tier == ours
    assert {
        "cpu_bytes_to_use": 1 << 30,
        "secondary_tiers": [fs, tier],
        "spec_name": "TieringOffloadingSpec",
    } == extra


def test_a_second_call_changes_nothing() -> None:
    extra: dict[str, Any] = dict(REDIS)
    _settings.complete_tiers(extra)
    before = json.dumps(extra)
    _settings.complete_tiers(extra)

    assert before == json.dumps(extra)


def test_a_listed_tier_of_ours_needs_no_field_beside_it() -> None:
    listed = {"type": "HiCacheTier", **REDIS}
    extra: dict[str, Any] = {"secondary_tiers": [listed]}

    assert [{**listed, "module_path": _settings.MODULE}] == _settings.complete_tiers(extra)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "backend: this field is required"),
        ({"tenant": "a"}, "backend: this field is required"),
        ({"backend": ""}, "backend"),
        ({**REDIS, "spec_name": "CPUOffloadingSpec"}, "spec_name: must be 'TieringOffload"),
        ({**REDIS, "secondary_tiers": {}}, "secondary_tiers: must be a list"),
        ({**REDIS, "lookup_timout_s": 1}, "did you mean 'lookup_timeout_s'"),
        ({**REDIS, "locality": "NEAR"}, "locality"),
        ({**REDIS, "load_timeout_s": 0}, "load_timeout_s"),
        ({**REDIS, "checksum": "crc"}, "checksum"),
    ],
)
def test_a_wrong_field_is_named(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _settings.complete_tiers(extra)


def test_fields_that_are_not_like_ours_are_vllms() -> None:
    extra: dict[str, Any] = {**REDIS, "something_new_of_vllm": 1}

    _settings.complete_tiers(extra)

    assert 1 == extra["something_new_of_vllm"]


def test_an_unknown_field_of_a_tier_is_an_error() -> None:
    with pytest.raises(ConfigError, match="unknown field 'colour'"):
        _settings.tier_settings({"type": "HiCacheTier", **REDIS, "colour": "red"})


def test_the_file_is_named_where_it_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "redis.toml"
    path.write_text("url = hush")
    settings = _settings.tier_settings({"backend": "redis", "config": f"@{path}"})

    with pytest.raises(ConfigError, match=r"vllm: config: .*redis\.toml") as raised:
        settings.backend_fields()
    assert "hush" not in str(raised.value)


def test_the_package_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys\nimport hicache_storage.integrations.vllm as adapter\n"
        "assert not {'vllm', 'torch'} & set(sys.modules)\nprint(adapter.__all__)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert "['HiCacheConnector', 'HiCacheTier']\n" == done.stdout
