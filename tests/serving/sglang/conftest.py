"""What the scenarios of SGLang share: one server, whose store they change, and prompts with answers."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from serving.answers import Asked, Comparison
from serving.models import prompt
from serving.sglang.server import LinkedServer, SGLangServer, alone, shared

PLUG_POINTS = (
    pytest.param(SGLangServer, id="HiCache"),
    pytest.param(LinkedServer, id="linker"),
)
_PROMPTS = 8
_LENGTH = 600
_SMALL_TOKENS = 2560
_SHORT = 300


def ask_cold(server: SGLangServer, asked: Asked) -> Comparison:
    """Empty both pools and ask all prompts. What is not computed then comes from the storage."""
    server.settle()
    server.flush()
    return asked.again(server.ask)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[SGLangServer]:
    """Yield a server for all scenarios. Each of them attaches its own store."""
    with SGLangServer(tmp_path_factory.mktemp("server")) as server, shared(server):
        yield server


@pytest.fixture(scope="session")
def asked(server: SGLangServer) -> Asked:
    """Return prompts with the answers of the server without a store."""
    server.detach()
    server.flush()
    return Asked.of(server.ask, [prompt(number, _LENGTH) for number in range(_PROMPTS)])


@pytest.fixture(scope="module")
def small(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[SGLangServer]:
    """Yield a server whose device pool holds eight prompts of `many`, and its host pool eight more.

    Its class may be given as the indirect parameter: one of `PLUG_POINTS`.
    """
    directory: Path = tmp_path_factory.mktemp("small")
    kind: type[SGLangServer] = getattr(request, "param", SGLangServer)
    with alone(), kind(directory, tokens=_SMALL_TOKENS) as server:
        yield server


def many(server: SGLangServer, count: int) -> Asked:
    """Return prompts that are more than `small` holds, with its answers without a store."""
    server.detach()
    server.flush()
    return Asked.of(server.ask, [prompt(number, _SHORT) for number in range(count)])
