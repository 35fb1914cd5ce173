"""A real engine that serves HTTP on loopback: what the servers of vLLM and SGLang have in common."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from servers import ServerProcess
from serving.answers import Answer

ANSWER_TOKENS = 16
ANSWER_LIMIT_S = 300.0


class EngineServer(ServerProcess):
    """An engine in a session of its own. It and all its processes end together.

    Call `ask` from any thread, the others from one.
    """

    version = ""
    """The engine's name and version."""
    plug_point = ""
    """What the events of its notes begin with, if the engine has several places for a store."""
    own_session = True
    ready_limit_s = 300.0
    end_limit_s = 60.0

    def ask(self, prompt: Sequence[int], tokens: int = ANSWER_TOKENS) -> Answer:
        """Stream one greedy answer of exactly `tokens` tokens. A failure is an answer with an error."""
        raise NotImplementedError

    def read(self, part: Any, answer: Answer, now_s: float) -> None:
        """Add a part of a streamed answer, which came so long after the request."""
        raise NotImplementedError

    def stream(self, path: str, body: Mapping[str, Any], tokens: int) -> Answer:
        """Post a request and read the server-sent events of its answer."""
        answer = Answer()
        began_s = time.monotonic()
        address = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_LIMIT_S)
        with closing(address) as connection:
            try:
                headers = {"content-type": "application/json"}
                connection.request("POST", path, json.dumps({**body, "stream": True}), headers)
                reply = connection.getresponse()
                if reply.status != http.HTTPStatus.OK:
                    answer.error = f"{reply.status}: {reply.read().decode()[:300]}"
                for line in reply:
                    if line.startswith(b"data: {"):
                        self.read(json.loads(line[6:]), answer, time.monotonic() - began_s)
            except (OSError, http.client.HTTPException, ValueError) as error:
                answer.error = f"{type(error).__name__}: {error}"
        answer.total_s = time.monotonic() - began_s
        if not answer.error and len(answer.tokens) != tokens:
            answer.error = f"{len(answer.tokens)} tokens instead of {tokens}"
        return answer

    def loaded_tokens(self) -> float:
        """Return how many tokens have come from the store so far."""
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

    def pause(self) -> None:
        """Stop all its processes."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """Kill the server and what it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        super().stop()
