"""What the scenarios of vLLM share: prompts, their reference answers, and a server for each phase."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving.answers import Asked
from serving.models import prompt
from serving.vllm.server import VLLMServer


@pytest.fixture(scope="session")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Return prompts with the answers of a server that has no store and no prefix cache."""
    with VLLMServer(tmp_path_factory.mktemp("reference")) as server:
        return Asked.of(server.ask, [prompt(number, 1000) for number in range(8)])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return where a scenario's pages are."""
    return tmp_path / "pages"
