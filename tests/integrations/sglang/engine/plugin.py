"""With our plug-in loaded, SGLang's config names a backend of ours, and no module and no class."""

from __future__ import annotations

import importlib
from collections.abc import Generator
from importlib import metadata
from typing import Any

import pytest
from sglang_engine import Engine, PoolPlan, engine_world, write_and_read

from hicache_storage.integrations import sglang as integration

plugins: Any = importlib.import_module("sglang.srt.plugins")
storage: Any = importlib.import_module("sglang.srt.mem_cache.storage")


@pytest.fixture(scope="module", autouse=True)
def world() -> Generator[None]:
    with engine_world():
        plugins.load_plugins()
        yield


def test_a_backend_name_is_enough(file_config: dict[str, Any]) -> None:
    """The pages move without SGLang's additional copy, too."""
    config = {name: file_config[name] for name in ("backend_name", "path")}

    with Engine([PoolPlan()], config) as writer, Engine([PoolPlan()], config) as reader:
        write_and_read(writer, reader)

        assert isinstance(reader.controller.storage_backend, integration.SGLangHiCacheStorage)
        assert reader.controller.page_get_func == reader.controller._page_get_zero_copy


def test_a_config_that_names_another_class_gets_it() -> None:
    fields = {"backend_name": "file", "module_path": "collections", "class_name": "deque"}
    config = type("Config", (), {"extra_config": fields})

    with pytest.raises(TypeError, match="deque must inherit"):
        storage.StorageBackendFactory.create_backend("dynamic", config, None)


@pytest.mark.parametrize("fields", [None, {}, {"path": "pages"}])
def test_a_config_without_a_backend_is_left_to_sglang(fields: Any) -> None:
    config = type("Config", (), {"extra_config": fields})

    with pytest.raises(ValueError, match=r"Missing required field|Unknown storage backend"):
        storage.StorageBackendFactory.create_backend("dynamic", config, None)


@pytest.mark.skipif(metadata.version("sglang") < "0.5.23", reason="it has no linker")
def test_a_linker_needs_only_its_backend() -> None:
    module: Any = importlib.import_module("sglang.srt.mem_cache.unified_cache.linker_config")
    made = module.UnifiedCacheLinkerConfig.from_dict

    ours = made({"linker_extra_config": {"backend_name": "file"}})
    assert ("SGLangCacheLinker", integration.__name__) == (ours.linker, ours.linker_module_path)
    assert "Other" == made({"linker": "Other", "linker_module_path": "other"}).linker
    with pytest.raises(ValueError, match="must be a JSON object"):
        made(None)
