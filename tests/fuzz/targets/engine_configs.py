"""Extra configs of SGLang, vLLM and LMCache: the adapters' settings, or a ConfigError without values."""

from __future__ import annotations

import copy
from typing import Any

from fuzz.choices import CANARY, Choices

from hicache_storage.config import SGLANG_FIELDS
from hicache_storage.errors import ConfigError
from hicache_storage.integrations.lmcache._object_layouts import _serde_label
from hicache_storage.integrations.lmcache._settings import AdapterSettings as LMCacheSettings
from hicache_storage.integrations.sglang import _settings as sglang
from hicache_storage.integrations.sglang._launch import LaunchIdentity, _adapter_of
from hicache_storage.integrations.vllm import _settings as vllm

_SGLANG = sorted({*SGLANG_FIELDS, "adapter", "config", "path", "url"})
_ADAPTER = sorted(sglang.AdapterSettings.model_fields)
_TIER = sorted({*vllm.TierSettings.model_fields, *vllm._TIER_NAMES})
_VLLM = sorted({*vllm._ENGINE_FIELDS, *_TIER})
_LMCACHE = sorted(LMCacheSettings.model_fields)
_LAUNCH = (
    *("kv_cache_dtype", "speculative_draft_kv_cache_dtype", "speculative_draft_model_path"),
    *("lora_paths", "load_format", "revision", "quantization", "weight_version", "a_new_argument"),
)

SEEDS = (
    b"",
    *(
        bytes([kind, n, 1, n, 7, n, 5, 2, n]) + bytes(range(n, n + 30))
        for kind in range(4)
        for n in (1, 3, 5)
    ),
)


def check(data: bytes) -> None:
    choices = Choices(data)
    kind = choices.integer(0, len(_CHECKS) - 1)
    try:
        _CHECKS[kind](choices)
    except ConfigError as error:
        assert CANARY not in str(error)


def _sglang(choices: Choices) -> None:
    extra: dict[str, Any] = {"backend_name": "file", **choices.fields(_SGLANG)}
    if choices.flag():
        extra["adapter"] = choices.fields(_ADAPTER)
    before = copy.deepcopy(extra)
    name, settings, own = sglang.split_config(extra)
    assert before == extra
    assert name == extra["backend_name"]
    assert settings.timeout_s > 0
    nested: dict[str, Any] = extra.get("config", {})
    assert own.keys() <= extra.keys() | nested.keys()
    assert all(own[field] == nested[field] for field in nested)


def _vllm(choices: Choices) -> None:
    extra = {"backend": "file", **choices.fields(_VLLM)}
    if choices.flag():
        extra["secondary_tiers"] = [
            {"type": vllm.TIER, **choices.fields(_TIER)} for _ in range(choices.integer(0, 2))
        ]
    tiers = vllm.complete_tiers(extra)
    assert tiers
    again = copy.deepcopy(extra)
    assert tiers == vllm.complete_tiers(again)
    assert extra == again, "a second call changes nothing"
    for tier in tiers:
        assert vllm.tier_settings(tier).load_timeout_s > 0


def _lmcache(choices: Choices) -> None:
    params = {"backend": "file", "revision": "1", **choices.fields(_LMCACHE)}
    settings = LMCacheSettings.of(params)
    settings.check_ttls()
    if settings.serde:
        assert _serde_label(settings.serde) == _serde_label(dict(reversed(settings.serde.items())))


def _launch(choices: Choices) -> None:
    """Assert that launches with equal arguments have equal revisions.

    An error about an unreadable path may contain the path, because it is not a secret.
    """
    arguments = {**choices.fields(_LAUNCH), "model_path": None}
    settings = sglang.AdapterSettings(weights="w")
    if not isinstance(arguments.get("lora_paths") or [], list):
        arguments["lora_paths"] = None
    arguments["lora_paths"] = [
        path for path in arguments.get("lora_paths") or () if "\0" not in _adapter_of(path)[1]
    ]
    try:
        revisions = [
            LaunchIdentity(given, settings).revision(draft=False)
            for given in (arguments, dict(reversed(arguments.items())))
        ]
    except ConfigError as error:
        assert "cannot be read" in str(error)
        return
    assert revisions[0] == revisions[1]
    changed = {**arguments, "quantization": "another"}
    assert revisions[0] != LaunchIdentity(changed, settings).revision(draft=False)
    assert LaunchIdentity(arguments, settings).kv_label("draft")


_CHECKS = (_sglang, _vllm, _lmcache, _launch)
