"""What the scenarios of vLLM share: prompts with their answers, and how they are asked."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from serving.answers import Asked, Comparison
from serving.models import prompt
from serving.vllm.server import VLLMServer

_PROMPTS = 8
_LENGTH = 600
_SHORT = 300
ENDING = ("--shutdown-timeout", "10")
"""At SIGTERM vLLM waits so long for its engine to end. Without it, the engine may be killed at once."""
SMALL = (*ENDING, "--max-model-len", "1024", "--num-gpu-blocks-override", "100")
SMALL_NBYTES = 8 << 20
"""With these options and this CPU tier, a server holds 13 prompts of `many`."""


def prompts(first: int = 0) -> list[list[int]]:
    """Return eight prompts, from this number on."""
    return [prompt(first + number, _LENGTH) for number in range(_PROMPTS)]


def many(server: VLLMServer, count: int) -> Asked:
    """Return so many short prompts with the answers of a server."""
    return Asked.of(server.ask, [prompt(number, _SHORT) for number in range(count)])


def ask_cold(server: VLLMServer, asked: Asked) -> Comparison:
    """Ask all prompts when neither the KV cache nor the CPU tier has them."""
    server.flush()
    return asked.again(server.ask)


@pytest.fixture(scope="session")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Generator[VLLMServer]:
    """Yield the server of `reference`, which may still be starting."""
    server = VLLMServer(tmp_path_factory.mktemp("reference"))
    server.launch()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def reference(launched: VLLMServer) -> VLLMServer:
    """Return a server that has no store and no prefix cache."""
    launched.wait_until_ready()
    return launched


@pytest.fixture(scope="session")
def asked(reference: VLLMServer) -> Asked:
    """Return prompts with the answers of a server without a store."""
    return Asked.of(reference.ask, prompts())
