"""What the scenarios of vLLM share: prompts, their reference answers, and a server for each phase."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving.answers import Answer
from serving.models import prompt
from serving.vllm.server import CHUNK, VLLMServer

Prompts = list[list[int]]


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    return [prompt(number, 1000) for number in range(8)]


@pytest.fixture(scope="session")
def references(prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """Return the answers of a server that has no store and no prefix cache."""
    with VLLMServer(tmp_path_factory.mktemp("reference")) as server:
        answers = [server.ask(prompt) for prompt in prompts]
        assert not any(answer.failed for answer in answers), answers
        server.end()
    assert not any(answer.cached_tokens for answer in answers)
    assert len({tuple(answer.tokens) for answer in answers}) == len(answers)
    return answers


@pytest.fixture
def stored_tokens(prompts: Prompts) -> int:
    """How many tokens of the prompts a store can give back: vLLM computes at least the last one."""
    return sum((len(prompt) - 1) // CHUNK * CHUNK for prompt in prompts)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return where a scenario's pages are."""
    return tmp_path / "pages"
