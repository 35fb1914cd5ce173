"""The containers of `deploy/sglang`, with flags for a CPU: a restart, and the port for Prometheus."""

from __future__ import annotations

from pathlib import Path

import pytest
from manifests import EngineHost
from serving.deployed import restart
from serving.sglang.server import SGLangServer


class Deployed(SGLangServer):
    """A server by the arguments of the container."""

    def __init__(self, directory: Path, host: EngineHost) -> None:
        super().__init__(directory)
        host.replaced |= {"--hicache-size=32": "--hicache-size=1"}
        host.replaced |= {"--port=30000": f"--port={self.port}"}
        self._host = host

    def command(self) -> list[str]:
        python, *words = self._host.run("sglang")
        assert [python, *words[:2]] == ["python3", "-m", "sglang.launch_server"]
        return [
            *super().command(),
            *words[2:],
        ]  # of a flag that is there twice, the last one counts


@pytest.mark.long
def test_a_restarted_container_takes_the_tokens_from_redis(tmp_path: Path) -> None:
    restart("sglang", tmp_path, Deployed)
