"""With our plug-in loaded, vLLM's config names our classes, and no module."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest
import vllm_cpu
from vllm_engine import FULL, PROMPT, Engine

from hicache_storage.integrations import vllm as integration
from hicache_storage.integrations.vllm import _plugin

vllm_cpu.stand_in()
plugins: Any = importlib.import_module("vllm.plugins")
tiers: Any = importlib.import_module("vllm.v1.kv_offload.tiering.factory")


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    plugins.load_general_plugins()


def test_the_connector_is_found_by_its_name(file_config: dict[str, Any]) -> None:
    with Engine(file_config, module=None) as engine:
        engine.write(PROMPT)
    with Engine(file_config, module=None) as engine:
        answer = engine.write(PROMPT)

        assert isinstance(engine.connector, integration.HiCacheConnector)
        assert (answer.computed, answer.wrong) == (FULL, 0)


def test_the_tier_is_found_by_its_type() -> None:
    found = tiers.SecondaryTierFactory.get_tier_class({"type": "HiCacheTier"})

    assert found is integration.HiCacheTier


def test_a_second_call_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    _plugin.register()

    assert not caplog.records


def test_a_registry_that_is_missing_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tiers, "SecondaryTierFactory")

    with caplog.at_level(logging.WARNING):
        _plugin.register()

    assert "vLLM does not know HiCacheTier by name" in caplog.text
