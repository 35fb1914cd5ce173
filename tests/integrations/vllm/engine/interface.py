"""The adapter supports the installed vLLM, and detects a different interface."""

from __future__ import annotations

import abc
import dataclasses
import enum
import importlib
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_cpu

from hicache_storage.integrations import vllm as adapter
from hicache_storage.integrations.vllm import _interface

vllm_cpu.stand_in()

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
NAMES = {
    "base": "vllm.v1.kv_offload.base",
    "config": "vllm.v1.kv_offload.config",
    "tiering": "vllm.v1.kv_offload.tiering.base",
    "connector": f"{_CONNECTORS}.offloading_connector",
    "metrics": f"{_CONNECTORS}.offloading.metrics",
    "kv_cache": "vllm.v1.kv_cache_interface",
}
MODULES = _interface.Modules(
    **{name: importlib.import_module(path) for name, path in NAMES.items()}
)
MEMBERS: dict[str, dict[str, Any]] = {
    name: vars(importlib.import_module(path)) for name, path in NAMES.items()
}
factory: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")


def changed(module: str, **changes: Any) -> _interface.Modules:
    """Return vLLM's modules, one of them with `changes`."""
    return MODULES._replace(**{module: SimpleNamespace(**{**MEMBERS[module], **changes})})


def test_this_vllm_is_known() -> None:
    assert [] == _interface.differences(MODULES)
    assert metadata.version("vllm") in _interface.TESTED_VERSIONS


def test_the_classes_satisfy_vllms_factories() -> None:
    assert issubclass(adapter.HiCacheTier, MODULES.tiering.SecondaryTierManager)
    assert not getattr(adapter.HiCacheTier, "__abstractmethods__", None)
    assert issubclass(adapter.HiCacheConnector, MODULES.connector.OffloadingConnector)
    assert factory.supports_kw(adapter.HiCacheConnector, "kv_cache_config")
    assert factory.supports_hma(adapter.HiCacheConnector)
    assert adapter.HiCacheTier is adapter.HiCacheTier


def test_hits_count_as_hits_of_a_disk() -> None:
    tier: Any = adapter.HiCacheTier

    assert "disk" == tier.cache_hit_source.value


class AnotherSignature(MODULES.tiering.SecondaryTierManager):  # type: ignore[misc, name-defined]
    def lookup(self, keys: Any, req_context: Any) -> Any: ...


class AnotherDuty(MODULES.tiering.SecondaryTierManager):  # type: ignore[misc, name-defined]
    @abc.abstractmethod
    def submit_removal(self) -> None: ...


class OtherResults(enum.Enum):
    MISS = 1
    HIT = 2


@dataclasses.dataclass
class LessJob:
    job_id: int
    keys: Any
    req_context: Any


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        ("tiering", {"SecondaryTierManager": AnotherSignature}, r"lookup takes \(keys, req_con"),
        ("tiering", {"SecondaryTierManager": AnotherDuty}, "submit_removal is abstract"),
        ("tiering", {"SecondaryTierManager": None}, "SecondaryTierManager is missing"),
        ("tiering", {"TransferJob": LessJob}, "TransferJob lacks the field chunk_ids"),
        ("base", {"LookupResult": OtherResults}, "LookupResult lacks the member RETRY"),
        ("connector", {"OffloadingConnector": LessJob}, "__init__ takes"),
    ],
)
def test_every_difference_is_named(module: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportError, match=message) as raised:
        _interface.check_interface(changed(module, **changes), "9.9.9")
    assert "vLLM 9.9.9" in str(raised.value)
    assert "0.33.0" in str(raised.value)


def test_a_further_optional_parameter_of_a_constructor_is_no_difference() -> None:
    class Extended(MODULES.tiering.SecondaryTierManager):  # type: ignore[misc, name-defined]
        def __init__(
            self,
            offloading_spec: Any,
            primary_kv_view: Any,
            tier_type: Any,
            backpressure_detector: Any = None,
            extra: Any = None,
        ) -> None: ...

    assert [] == _interface.differences(changed("tiering", SecondaryTierManager=Extended))
