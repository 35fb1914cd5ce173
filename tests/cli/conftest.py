"""Stores for the tests of the verbs. Each test has a store of its own, on shared servers."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_stores import BACKENDS, CliStore
from s3_kit import config_of, make_ready
from servers import Rclone, RedisServer


@pytest.fixture(autouse=True)
def no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the environment variables that make rich treat a file as a terminal."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rclone]:
    with Rclone(tmp_path_factory.mktemp("s3")) as server:
        make_ready(server)
        yield server


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yield a directory that other users may enter."""
    path = Path(tempfile.mkdtemp(prefix="hicache-looking-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def store_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], CliStore]:
    """Return a function that makes an empty store of a backend."""

    def make(backend: str) -> CliStore:
        name = uuid.uuid4().hex
        if backend == "redis":
            server: RedisServer = request.getfixturevalue("redis_server")
            return CliStore(backend, {"url": server.url, "prefix": f"{name}:"})
        if backend == "s3":
            s3: Rclone = request.getfixturevalue("s3_server")
            return CliStore(backend, config_of(s3, prefix=name))
        return CliStore(backend, {"path": str(tmp_path / name)})

    return make


@pytest.fixture(params=BACKENDS)
def store(request: pytest.FixtureRequest, store_of: Callable[[str], CliStore]) -> CliStore:
    """Return an empty store of each backend."""
    return store_of(request.param)


@pytest.fixture
def file_store(store_of: Callable[[str], CliStore]) -> CliStore:
    """Return an empty store of files."""
    return store_of("file")
