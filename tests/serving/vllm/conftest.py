"""What the scenarios of vLLM share: prompts with their answers, and how they are asked."""

from __future__ import annotations

import pytest
from serving.answers import Asked, Comparison
from serving.models import prompt
from serving.vllm.server import VLLMServer

_PROMPTS = 8
_LENGTH = 600
ENDING = ("--shutdown-timeout", "10")
"""With it, vLLM's engine process ends by itself. Without, SIGTERM kills it."""


def ask_cold(server: VLLMServer, asked: Asked) -> Comparison:
    """Ask all prompts when neither the KV cache nor the CPU tier has them."""
    server.flush()
    return asked.again(server.ask)


@pytest.fixture(scope="session")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Return prompts with the answers of a server that has no store and no prefix cache."""
    with VLLMServer(tmp_path_factory.mktemp("reference")) as server:
        return Asked.of(server.ask, [prompt(number, _LENGTH) for number in range(_PROMPTS)])
