"""`make release-check`: each extra of the wheel works alone in a new environment.

pytest does not collect this file by itself. `hicache doctor` opens the backend of an extra on a real
server, writes pages, and reads and deletes them.
"""

from __future__ import annotations

import ctypes.util
import json
import sys
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
from distributions import CONSTRAINTS, DIST, VERSION, ended, run
from s3_kit import config_of
from servers import ROOT, Ministack, MooncakeMaster, RedisServer, library_path

from hicache_storage.errors import INSTALLED_FROM

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CLIENTS = {
    "redis": "redis",
    "s3": "boto3",
    "fsspec": "fsspec",
    "mooncake": "mooncake",
    "encrypted": "cryptography",
}
"""For each backend that needs an extra, the module of its client library."""
TORCH = """
from hicache_storage.host_pool import HostPool, PageShape
shape = PageShape.mha(page_tokens=64, layers=2, heads=2, head_dim=8, dtype="bfloat16")
with HostPool(shape, slots=2) as pool:
    print(pool.tensors()[0].dtype)
"""
METRICS = """
from prometheus_client import CollectorRegistry, generate_latest
from hicache_storage import open_storage
from hicache_storage.metrics import CacheCollector
from hicache_storage.page_store import PageStore
registry = CollectorRegistry()
with open_storage("memory") as storage, PageStore(storage) as store:
    registry.register(CacheCollector(store))
    print(generate_latest(registry).decode())
"""

TRACING = """
from hicache_storage import open_storage
from hicache_storage.observers import open_observers
from hicache_storage.page_store import PageStore
observers = open_observers(tracing=True, attributes={"engine": "none"})
with open_storage("memory") as storage, PageStore(storage, observers=observers) as store:
    print(type(observers[0]).__name__)
"""
EVENTS = """
from hicache_storage.events.messages import AllBlocksCleared
from hicache_storage.events.publisher import EventPublisher
from hicache_storage.events.settings import EventSettings
publisher = EventPublisher(EventSettings(endpoint="inproc://events", bind=True))
publisher.publish([AllBlocksCleared()])
publisher.close()
print("published")
"""


class Installed:
    """The wheel with one extra or none in an environment of its own, and a directory to work in."""

    def __init__(self, wheel: Path, extra: str, directory: Path) -> None:
        self.directory = directory
        self.programs = directory / "environment" / "bin"
        run(directory, sys.executable, "-m", "venv", "--without-pip", self.programs.parent)
        pip = (sys.executable, "-m", "pip", "--python", self.programs / "python")
        wanted = f"{wheel}[{extra}]" if extra else str(wheel)
        run(DIST, *pip, "install", "--quiet", "--no-compile", "-c", CONSTRAINTS, wanted)
        run(DIST, *pip, "check")

    def runs(self, program: str, *arguments: str) -> str:
        return run(self.directory, self.programs / program, *arguments, **library_path())

    def doctor(self, backend: str, config: dict[str, Any], *options: str) -> tuple[int, str]:
        """Return the exit code of `hicache doctor`, and what it printed."""
        store = ["--hicache-storage-backend", backend]
        store += ["--hicache-storage-backend-extra-config", json.dumps(config)]
        hicache = self.programs / "hicache"
        done = ended(self.directory, hicache, "doctor", *store, *options, **library_path())
        return done.returncode, done.stdout

    def serves(self, backend: str, config: dict[str, Any]) -> bool:
        """Return True if pages can be written to a store of this backend and read back.

        A finding only about speed does not count, because this machine is not that of a cache.
        """
        code, printed = self.doctor(backend, config, "--page-bytes", "64KiB", "--json")
        assert code in {0, 1}, printed
        found = json.loads(printed[printed.index("{\n") :])
        status = {check["topic"]: check["status"] for check in found["checks"]}
        assert {"open", "write", "read"} <= set(status), printed
        troubles = {topic for topic in status if status[topic] == "problem"}
        return troubles <= {"round trip", "prefetch"}

    def serves_files(self) -> bool:
        return self.serves("file", {"path": str(self.directory / "pages")})


@pytest.fixture
def installed(distributions: tuple[Path, Path], tmp_path: Path) -> Callable[[str], Installed]:
    return lambda extra: Installed(distributions[1], extra, tmp_path)


def test_every_extra_has_a_test() -> None:
    tested = {name.removeprefix("test_extra_") for name in globals() if "test_extra_" in name}

    assert {extra.replace("-", "_") for extra in PROJECT["optional-dependencies"]} == tested


def test_without_an_extra_files_are_served(installed: Callable[[str], Installed]) -> None:
    plain = installed("")

    assert f"hicache {VERSION} (compiled data plane)\n" == plain.runs("hicache", "--version")
    assert plain.serves_files()
    for backend, module in CLIENTS.items():
        code, printed = plain.doctor(backend, {})
        assert code in {1, 2}
        assert f"{INSTALLED_FROM}[{backend}]" in printed, module


def test_extra_torch(installed: Callable[[str], Installed]) -> None:
    with_torch = installed("torch")

    assert with_torch.serves_files()
    assert "torch.bfloat16\n" == with_torch.runs("python", "-c", TORCH)


def test_extra_metrics(installed: Callable[[str], Installed]) -> None:
    with_metrics = installed("metrics")

    assert with_metrics.serves_files()
    assert "hicache_pages_total" in with_metrics.runs("python", "-c", METRICS)


def test_extra_otel(installed: Callable[[str], Installed]) -> None:
    assert "SpanTracer\n" == installed("otel").runs("python", "-c", TRACING)


def test_extra_events(installed: Callable[[str], Installed]) -> None:
    assert "published\n" == installed("events").runs("python", "-c", EVENTS)


def test_extra_completion(installed: Callable[[str], Installed]) -> None:
    assert "complete" in installed("completion").runs("hicache", "--print-completion", "bash")


def test_extra_redis(installed: Callable[[str], Installed], tmp_path: Path) -> None:
    with RedisServer(tmp_path / "server") as server:
        assert installed("redis").serves("redis", {"url": server.url})


def test_extra_s3(installed: Callable[[str], Installed], tmp_path: Path) -> None:
    with Ministack(tmp_path / "server") as server:
        assert installed("s3").serves("s3", config_of(server))


def test_extra_encrypted(installed: Callable[[str], Installed], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    inner = {"backend": "file", "config": {"path": f"{tmp_path}/pages"}}
    fields = {"keys": {"a": {"file": str(key)}}, "current_key": "a"}

    assert installed("encrypted").serves("encrypted", {**inner, **fields})


def test_extra_fsspec(installed: Callable[[str], Installed], tmp_path: Path) -> None:
    assert installed("fsspec").serves("fsspec", {"url": f"file://{tmp_path}/pages"})


def test_extra_mooncake_non_cuda(installed: Callable[[str], Installed], tmp_path: Path) -> None:
    with MooncakeMaster(tmp_path / "master") as master:
        assert installed("mooncake-non-cuda").serves("mooncake", master.config())


@pytest.mark.skipif(
    ctypes.util.find_library("cuda") is not None, reason="the advice is for machines without CUDA"
)
def test_extra_mooncake(installed: Callable[[str], Installed]) -> None:
    """Without CUDA the wheel for CUDA can be installed, and the error names the wheel to use."""
    code, printed = installed("mooncake").doctor("mooncake", {"master_server_address": "x:1"})

    assert code in {1, 2}
    assert "mooncake-transfer-engine-non-cuda in its place" in printed


def test_extra_conformance(installed: Callable[[str], Installed]) -> None:
    kit = installed("conformance")

    assert "CONFORMANT" in kit.runs(
        "hicache-conformance", "--hicache-storage-backend", "memory", "--rules", "KV-00*", "--quick"
    )


def test_extra_all(installed: Callable[[str], Installed], tmp_path: Path) -> None:
    every = installed("all")

    with RedisServer(tmp_path / "server") as server:
        assert every.serves("redis", {"url": server.url})
    assert "torch.bfloat16\n" == every.runs("python", "-c", TORCH)
    assert "hicache_pages_total" in every.runs("python", "-c", METRICS)
