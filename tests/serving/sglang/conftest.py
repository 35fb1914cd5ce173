"""What the scenarios of SGLang share: one server, whose store they change, and prompts with answers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import pytest
from serving.answers import Answer, Comparison, ask_all, compare
from serving.models import prompt
from serving.sglang.server import PAGE, SGLangServer

_PROMPTS = 8
_LENGTH = 600


@dataclass(frozen=True)
class Asked:
    """Prompts, and their answers by a server without a store that computed each of them alone."""

    prompts: Sequence[Sequence[int]]
    references: Sequence[Answer]

    @classmethod
    def by(cls, server: SGLangServer, prompts: Sequence[Sequence[int]]) -> Asked:
        """Let a server without a store answer."""
        server.detach()
        server.flush()
        references = [server.ask(prompt) for prompt in prompts]
        assert not any(answer.failed for answer in references), references
        assert not any(answer.cached_tokens for answer in references)
        assert len({tuple(answer.tokens) for answer in references}) == len(references)
        return cls(prompts, references)

    def ask(self, server: SGLangServer, clients: int = 8) -> tuple[Comparison, int]:
        """Ask all prompts. Return how the answers compare, and how many tokens were not computed."""
        answers = ask_all(server.ask, self.prompts, clients)
        return compare(answers, self.references), sum(answer.cached_tokens for answer in answers)

    def ask_cold(self, server: SGLangServer) -> tuple[Comparison, int]:
        """Empty both pools and ask all prompts. What is not computed then comes from the storage."""
        server.settle()
        server.flush()
        return self.ask(server)

    @property
    def stored_tokens(self) -> int:
        """How many tokens of the prompts a storage can give back: SGLang computes the last one."""
        return sum((len(prompt) - 1) // PAGE * PAGE for prompt in self.prompts)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[SGLangServer]:
    """Yield a server for all scenarios. Each of them attaches its own store."""
    with SGLangServer(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="session")
def asked(server: SGLangServer) -> Asked:
    return Asked.by(server, [prompt(number, _LENGTH) for number in range(_PROMPTS)])
