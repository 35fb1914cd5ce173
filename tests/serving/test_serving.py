"""Real servers of the engines: the scenarios beside this file, each engine's in its environment.

What is not marked `long` in an engine's scenarios is its short form. `make test-serving` runs all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Engine:
    environment = ""
    folder = ""

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    def test_the_short_form(self, run_elsewhere: Callable[..., None]) -> None:
        self._run(run_elsewhere, "not long")

    @pytest.mark.long
    @pytest.mark.timeout(7200)
    def test_every_scenario(self, run_elsewhere: Callable[..., None]) -> None:
        self._run(run_elsewhere, "long or not long")

    def _run(self, run: Callable[..., None], which: str) -> None:
        place = ROOT / "tests/serving" / self.folder
        names = {"conftest", "demo", "device", "launch", "lmcache", "server"}
        scenarios = [str(path) for path in sorted(place.glob("*.py")) if path.stem not in names]
        run(ROOT / self.environment / "bin/python", "-m", which, "--timeout", "1800", *scenarios)


class TestVLLM(Engine):
    environment = ".venv-vllm-serving"
    folder = "vllm"


class TestSGLang(Engine):
    environment = ".venv-sglang-engine"
    folder = "sglang"
