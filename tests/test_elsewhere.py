"""Tests that need an environment or a process of their own. Their reports count in this run.

The short pass of an engine uses its adapter once. All other tests of the engine are `slow`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOONCAKE = ("settings", "storage", "read_only", "writers", "tenants", "conformance")


class Engine:
    environment = ""
    folder = ""
    short: tuple[str, ...] = ()

    def _run(self, run: Callable[..., None], names: list[str]) -> None:
        files = [f"tests/integrations/{self.folder}/engine/{name}.py" for name in names]
        run(ROOT / self.environment / "bin/python", "-W", "default", *files)

    @pytest.mark.timeout(600)
    def test_a_short_pass(self, run_elsewhere: Callable[..., None]) -> None:
        self._run(run_elsewhere, list(self.short))

    @pytest.mark.slow
    @pytest.mark.timeout(1200)
    def test_the_rest(self, run_elsewhere: Callable[..., None]) -> None:
        names = {
            path.stem for path in (ROOT / f"tests/integrations/{self.folder}/engine").glob("*.py")
        }
        assert names > set(self.short)
        self._run(run_elsewhere, sorted(names - set(self.short)))


class TestSGLang(Engine):
    environment = ".venv-sglang-engine"
    folder = "sglang"
    short = ("interface", "controller")


class TestVLLM(Engine):
    environment = ".venv-vllm"
    folder = "vllm"
    short = ("interface", "cold")


class TestLMCache(Engine):
    environment = ".venv-lmcache"
    folder = "lmcache"
    short = ("interface", "storage")


class TestMooncake:
    """These tests run elsewhere, because native code may crash or hang its process."""

    @pytest.mark.timeout(600)
    def test_the_backend_on_a_real_master(
        self, run_elsewhere: Callable[..., None], request: pytest.FixtureRequest
    ) -> None:
        report: str | None = request.config.option.hicache_report
        more = ["--hicache-report", report] if report else []
        files = [f"tests/backends/mooncake/{name}.py" for name in MOONCAKE]
        run_elsewhere(Path(sys.executable), "--hicache-quick", *more, *files)

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_a_storm_and_a_replay(self, run_elsewhere: Callable[..., None]) -> None:
        """The storm comes first: it forks, which a process with a native client must not do."""
        files = ["tests/storm/over_mooncake.py", "tests/replay/over_mooncake.py"]
        run_elsewhere(Path(sys.executable), *files)
