"""`adapter_params` for stores of each kind."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from servers import Rclone, RedisServer


@pytest.fixture
def file_params(tmp_path: Path) -> dict[str, Any]:
    return {"backend": "file", "config": {"path": str(tmp_path / "pages")}, "revision": "main"}


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Rclone]:
    with Rclone(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["file", "hf3fs", "redis", "s3"])
def params(
    request: pytest.FixtureRequest, tmp_path: Path, file_params: dict[str, Any]
) -> dict[str, Any]:
    if request.param in {"file", "hf3fs"}:
        return {**file_params, "backend": request.param}
    if request.param == "redis":
        redis: RedisServer = request.getfixturevalue("redis_server")
        config: dict[str, Any] = {"url": redis.url, "prefix": f"{tmp_path.name}:"}
    else:
        s3: Rclone = request.getfixturevalue("s3_server")
        config = {
            "bucket": "pages",
            "prefix": f"{tmp_path.name}/",
            "endpoint_url": s3.endpoint_url,
            "access_key_id": s3.access_key,
            "secret_access_key": s3.secret_key,
            "create_bucket": True,
        }
    return {"backend": request.param, "config": config, "revision": "main"}
