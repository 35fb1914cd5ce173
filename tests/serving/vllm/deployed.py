"""The containers of `deploy/vllm`, with flags for a CPU: a restart, and the port for Prometheus."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from manifests import EngineHost
from serving.deployed import restart
from serving.vllm.server import CPU_NBYTES, VLLMServer

_FIRST = 5
"""The words before the flags of `vllm serve`: sh, -c, a script, its name, and the model."""


class Deployed(VLLMServer):
    """A server by the command of the container."""

    def __init__(self, directory: Path, host: EngineHost) -> None:
        super().__init__(directory, prefix_cache=True)
        host.replaced |= {"34359738368": str(CPU_NBYTES), "--port=8000": f"--port={self.port}"}
        self._host = host

    def command(self) -> list[str]:
        words = self._host.run("vllm")
        _, _, _, *flags = super().command()
        return [*words[:_FIRST], *flags, *words[_FIRST:]]

    def environment(self) -> Mapping[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**super().environment(), "PATH": path}


@pytest.mark.long
def test_a_restarted_container_takes_the_tokens_from_redis(tmp_path: Path) -> None:
    restart("vllm", tmp_path, Deployed)
