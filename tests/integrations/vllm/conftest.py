"""vLLM's extra config for stores of each kind."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from s3_kit import config_of, make_ready
from servers import Ministack, RedisServer


@pytest.fixture
def file_config(tmp_path: Path) -> dict[str, Any]:
    return {"backend": "file", "config": {"path": str(tmp_path / "pages")}}


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Ministack]:
    with Ministack(tmp_path_factory.mktemp("s3")) as server:
        make_ready(server)
        yield server


@pytest.fixture(params=["file", "hf3fs", "redis", "s3"])
def config(
    request: pytest.FixtureRequest, tmp_path: Path, file_config: dict[str, Any]
) -> dict[str, Any]:
    if request.param in {"file", "hf3fs"}:
        return {**file_config, "backend": request.param}
    if request.param == "redis":
        redis: RedisServer = request.getfixturevalue("redis_server")
        return {
            "backend": "redis",
            "config": {"url": redis.url, "prefix": f"{tmp_path.name}:"},
        }
    s3: Ministack = request.getfixturevalue("s3_server")
    return {"backend": "s3", "config": config_of(s3, tmp_path.name)}
