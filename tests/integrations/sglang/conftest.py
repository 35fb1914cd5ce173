"""SGLang's extra config for stores of each kind."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from servers import MooncakeMaster, RedisServer, load_mooncake

ADAPTER = {
    "module_path": "hicache_storage.integrations.sglang",
    "class_name": "SGLangHiCacheStorage",
    "interface_v1": 1,
}


@pytest.fixture
def file_config(tmp_path: Path) -> dict[str, Any]:
    return {**ADAPTER, "backend_name": "file", "path": str(tmp_path / "pages")}


@pytest.fixture(scope="session")
def mooncake_master(tmp_path_factory: pytest.TempPathFactory) -> Generator[MooncakeMaster]:
    load_mooncake()
    with MooncakeMaster(tmp_path_factory.mktemp("mooncake")) as master:
        yield master


@pytest.fixture(params=["file", "redis", "mooncake"])
def config(
    request: pytest.FixtureRequest, tmp_path: Path, file_config: dict[str, Any]
) -> dict[str, Any]:
    if request.param == "file":
        return file_config
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        fields: dict[str, Any] = {"url": server.url, "prefix": f"{tmp_path.name}:"}
    else:
        master: MooncakeMaster = request.getfixturevalue("mooncake_master")
        fields = master.config(extra_backend_tag=tmp_path.name)
    return {**ADAPTER, "backend_name": request.param, "config": fields}
