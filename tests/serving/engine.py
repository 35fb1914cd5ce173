"""A real engine that serves HTTP on loopback: what the servers of vLLM and SGLang have in common."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress

from servers import ServerProcess
from serving.answers import Answer

STORES = ("memory", "file", "redis", "s3", "hf3fs", "mooncake", "encrypted")
ANSWER_TOKENS = 16


class EngineServer(ServerProcess):
    """An engine in a session of its own. It and all its processes end together.

    Call `ask` from any thread, the others from one.
    """

    own_session = True
    ready_limit_s = 300.0
    end_limit_s = 60.0

    def ask(self, prompt: Sequence[int], tokens: int = ANSWER_TOKENS) -> Answer:
        """Stream one greedy answer of exactly `tokens` tokens. A failure is an answer with an error."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until the engine has stored what it had to store."""
        raise NotImplementedError

    def metrics(self) -> Mapping[str, float]:
        """Return the samples of /metrics, by name and labels as they are printed."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:  # noqa: S310  # http only
            lines = reply.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answers(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/health", timeout=5):  # noqa: S310  # http only
            return True

    def end(self) -> float:
        """End the server by SIGTERM, as an operator does. Return how long that took, in seconds."""
        assert self._process is not None, "it is not running"
        began_s = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self.end_limit_s)
        took_s = time.monotonic() - began_s
        self.stop()
        return took_s

    def stop(self) -> None:
        """Kill the server and what it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        super().stop()
