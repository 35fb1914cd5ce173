"""LMCache's own server (MP mode) below vLLM, with its `resp` adapter over a Redis.

vLLM's environment has no LMCache. Its server finds the one of `.venv-lmcache` behind its own packages.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from servers import RedisServer, ServerProcess, free_port, library_path
from serving.vllm.server import CHUNK, VLLMServer

ROOT = Path(__file__).parents[3]
ENVIRONMENT = ROOT / ".venv-lmcache"
_L1_GB = 0.012
"""The memory of LMCache: 6,000 tokens. It evicts half of them early, so that pages come from Redis."""
_GETS = re.compile(r"cmdstat_get:calls=(\d+)")


class LMCacheServer(ServerProcess):
    """`lmcache server`. vLLM's connector exchanges pages with it over shared memory."""

    own_session = True
    ready_limit_s = 90.0

    def __init__(self, directory: Path, redis: RedisServer) -> None:
        super().__init__(directory)
        self.redis = redis
        self.http_port = free_port()

    def command(self) -> list[str]:
        adapter = {"type": "resp", "host": self.redis.address, "port": self.redis.port}
        words = (
            f"server --host 127.0.0.1 --port {self.port} --http-host 127.0.0.1"
            f" --http-port {self.http_port} --disable-metrics"
            f" --chunk-size {CHUNK} --l1-size-gb {_L1_GB} --no-l1-use-lazy"
            " --eviction-policy LRU --eviction-trigger-watermark 0.5 --eviction-ratio 0.5"
            " --supported-transfer-mode auto"
        )
        program = str(ENVIRONMENT / "bin" / "lmcache")
        return [program, *words.split(), "--l2-adapter", json.dumps(adapter)]

    def environment(self) -> Mapping[str, str]:
        return {"PYTHONPATH": "", "LMCACHE_TRACK_USAGE": "false"}

    def answers(self) -> bool:
        url = f"http://127.0.0.1:{self.http_port}/healthcheck"
        with urllib.request.urlopen(url, timeout=5):
            return True

    def kv(self) -> dict[str, Any]:
        """Return the config of vLLM's connector."""
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port}
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }


class LMCacheVLLM(VLLMServer):
    """A vLLM whose KV goes to an LMCache server."""

    def __init__(self, directory: Path, lmcache: LMCacheServer, *options: str) -> None:
        super().__init__(directory, lmcache.kv(), *options)
        self._redis = lmcache.redis
        self._gets = self._gets_before = 0

    def environment(self) -> Mapping[str, str]:
        given = super().environment()
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = ENVIRONMENT / "lib" / version / "site-packages"
        return {**given, "PYTHONPATH": f"{given['PYTHONPATH']}:{packages}", **library_path()}

    def loaded_tokens(self) -> float:
        """Return the tokens of the pages that Redis was asked for.

        A Redis that does not answer was asked for none since the last look. A new one counts from 0.
        """
        with suppress(OSError), self._redis.connected() as connection:
            connection.sendall(b"INFO commandstats\r\n")
            found = _GETS.search(connection.recv(1 << 16).decode())
            gets = int(found[1]) if found else 0
            if gets < self._gets:
                self._gets_before += self._gets
            self._gets = gets
        return CHUNK * (self._gets_before + self._gets)
