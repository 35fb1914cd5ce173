"""The adapter supports the installed SGLang, and detects a different interface."""

from __future__ import annotations

import abc
import dataclasses
import enum
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_cpu

from hicache_storage.integrations import sglang as adapter
from hicache_storage.integrations.sglang import _interface

sglang_cpu.stand_in()
storage: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
metrics: Any = importlib.import_module("sglang.srt.observability.metrics_collector")


def changed_module(**changes: Any) -> SimpleNamespace:
    """Return SGLang's module with `changes`."""
    return SimpleNamespace(**{**vars(storage), **changes})


def test_this_sglang_is_known() -> None:
    assert _interface.differences(storage, metrics) == []


def test_the_class_satisfies_sglangs_factory() -> None:
    assert issubclass(adapter.SGLangHiCacheStorage, storage.HiCacheStorage)
    assert not getattr(adapter.SGLangHiCacheStorage, "__abstractmethods__", None)
    assert adapter.SGLangHiCacheStorage is adapter.SGLangHiCacheStorage


class AnotherSignature(storage.HiCacheStorage):  # type: ignore[misc]
    def batch_get_v1(self, keys: Any, host_indices: Any, stream: Any) -> Any: ...


class AnotherDuty(storage.HiCacheStorage):  # type: ignore[misc]
    @abc.abstractmethod
    def batch_get_v3(self) -> None: ...


class OtherPolicies(enum.Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    EVERY_OTHER = "every_other"


@dataclasses.dataclass
class LessTransfer:
    name: str
    host_indices: Any
    keys: Any


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"HiCacheStorage": AnotherSignature},
            r"batch_get_v1 takes \(keys, host_indices, stream\)",
        ),
        ({"HiCacheStorage": AnotherDuty}, "batch_get_v3 is abstract"),
        ({"HiCacheStorage": None}, "HiCacheStorage is missing"),
        (
            {"PoolHitPolicy": OtherPolicies},
            "lacks the member block_groups.*new member 'every_other'",
        ),
        ({"PoolTransfer": LessTransfer}, "PoolTransfer lacks the field hit_policy"),
    ],
)
def test_every_difference_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportError, match=message) as raised:
        _interface.check_interface(changed_module(**changes), metrics, "9.9.9")
    assert "SGLang 9.9.9" in str(raised.value)
    assert "0.5.23" in str(raised.value)


def test_a_difference_of_the_metrics_is_named() -> None:
    changed = SimpleNamespace(StorageMetrics=LessTransfer)
    assert "StorageMetrics lacks" in "".join(_interface.differences(storage, changed))
