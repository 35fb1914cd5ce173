"""The adapter supports the installed LMCache, and detects a different interface."""

from __future__ import annotations

import abc
import dataclasses
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache_engine import named

from hicache_storage.integrations import lmcache as adapter
from hicache_storage.integrations.lmcache import _interface

MODULES = {name: importlib.import_module(path) for name, path in adapter._MODULES.items()}
base: Any = named("l2_adapters.base", "L2AdapterInterface")


def test_this_lmcache_is_known() -> None:
    assert [] == _interface.differences(MODULES)


def test_the_classes_satisfy_lmcaches_factory() -> None:
    assert issubclass(adapter.HiCacheL2Adapter, base)
    assert not getattr(adapter.HiCacheL2Adapter, "__abstractmethods__", None)
    config = adapter.HiCacheL2AdapterConfig
    assert issubclass(config, named("l2_adapters.config", "L2AdapterConfigBase"))
    assert not getattr(config, "__abstractmethods__", None)
    assert adapter.HiCacheL2Adapter is adapter.HiCacheL2Adapter


def test_the_help_names_every_field() -> None:
    settings = importlib.import_module("hicache_storage.integrations.lmcache._settings")
    text = adapter.HiCacheL2AdapterConfig.help()
    assert [] == [name for name in settings.AdapterSettings.model_fields if name not in text]


class AnotherSignature(base):  # type: ignore[misc]
    def submit_load_task(self, keys: Any, objects: Any, stream: Any) -> Any: ...


class AnotherDuty(base):  # type: ignore[misc]
    @abc.abstractmethod
    def get_placement(self) -> None: ...


@dataclasses.dataclass
class OlderKey:
    chunk_hash: bytes
    model_name: str
    kv_rank: int


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        ("base", {"L2AdapterInterface": AnotherSignature}, r"takes \(keys, objects, stream\)"),
        ("base", {"L2AdapterInterface": AnotherDuty}, "get_placement is abstract and unknown"),
        ("base", {"L2AdapterInterface": None}, "L2AdapterInterface is missing"),
        ("api", {"ObjectKey": OlderKey}, "ObjectKey lacks the field cache_salt, object_group_id"),
        ("native", {"Bitmap": object}, "Bitmap lacks the method set, test"),
        ("config", {"L2AdapterConfigBase": object}, "lacks the method from_dict, help"),
    ],
)
def test_every_difference_is_named(module: str, changes: dict[str, Any], message: str) -> None:
    changed = SimpleNamespace(**{**vars(MODULES[module]), **changes})
    with pytest.raises(ImportError, match=message) as raised:
        _interface.check_interface({**MODULES, module: changed}, "9.9.9")
    assert "LMCache 9.9.9" in str(raised.value)
    assert "0.5.6" in str(raised.value)
