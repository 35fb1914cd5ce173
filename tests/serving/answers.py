"""Answers of an engine, and how they compare with those of the same engine without a store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self

CLIENTS = 8


@dataclass
class Answer:
    """One streamed answer to a prompt of token ids."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float | None] = field(default_factory=list[float | None])
    """The log probability of each token; None stands for NaN, which JSON lacks."""
    first_token_s: float = 0.0
    total_s: float = 0.0
    cached_tokens: int = 0
    """How many tokens of the prompt the engine did not compute."""
    error: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error)


@dataclass(frozen=True)
class Comparison:
    """How many of the answers failed or have other tokens than their references."""

    answers: int
    failed: int
    different: int
    slowest_s: float
    cached_tokens: int

    @property
    def is_equal(self) -> bool:
        return not self.failed and not self.different


def compare(answers: Sequence[Answer], references: Sequence[Answer]) -> Comparison:
    """Compare each answer with the reference of the same prompt."""
    pairs = list(zip(answers, references, strict=True))
    return Comparison(
        answers=len(pairs),
        failed=sum(answer.failed for answer, _ in pairs),
        different=sum(
            answer.tokens != reference.tokens for answer, reference in pairs if not answer.failed
        ),
        slowest_s=max((answer.total_s for answer in answers), default=0.0),
        cached_tokens=sum(answer.cached_tokens for answer in answers),
    )


def ask_all(
    ask: Callable[[Sequence[int]], Answer],
    prompts: Sequence[Sequence[int]],
    clients: int = CLIENTS,
) -> list[Answer]:
    """Ask all prompts, `clients` at a time. Return the answers in the prompts' order."""
    with ThreadPoolExecutor(clients) as executor:
        return list(executor.map(ask, prompts))


@dataclass(frozen=True)
class Asked:
    """Prompts, and what an engine without a store answered to each of them, asked alone."""

    prompts: Sequence[Sequence[int]]
    references: Sequence[Answer]

    @classmethod
    def of(cls, ask: Callable[[Sequence[int]], Answer], prompts: Sequence[Sequence[int]]) -> Self:
        """Ask an engine that computes each answer."""
        references = [ask(prompt) for prompt in prompts]
        assert not any(answer.failed for answer in references), references
        assert not any(answer.cached_tokens for answer in references)
        assert len({tuple(answer.tokens) for answer in references}) == len(references)
        return cls(prompts, references)

    def again(self, ask: Callable[[Sequence[int]], Answer], clients: int = CLIENTS) -> Comparison:
        """Ask all prompts, `clients` at a time."""
        return compare(ask_all(ask, self.prompts, clients), self.references)

    def page_tokens(self, page: int) -> int:
        """How many tokens of the prompts a store can give back: an engine computes the last one."""
        return sum((len(prompt) - 1) // page * page for prompt in self.prompts)


class Traffic:
    """Clients that ask prompts again and again, until they are told to stop.

    with Traffic(server.ask, asked) as traffic:
        redis.pause()
    traffic.comparison()
    """

    def __init__(
        self, ask: Callable[[Sequence[int]], Answer], asked: Asked, clients: int = CLIENTS
    ) -> None:
        self._ask = ask
        self._asked = asked
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._rows: list[tuple[Answer, Answer]] = []
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(clients)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def answered(self) -> int:
        """Return how many answers have come so far."""
        with self._lock:
            return len(self._rows)

    def comparison(self, first: int = 0) -> Comparison:
        """Compare the answers that have come, from number `first` on."""
        with self._lock:
            rows = self._rows[first:]
        return compare([answer for answer, _ in rows], [reference for _, reference in rows])

    def _run(self, number: int) -> None:
        while not self._ended.is_set():
            place = number % len(self._asked.prompts)
            answer = self._ask(self._asked.prompts[place])
            with self._lock:
                self._rows.append((answer, self._asked.references[place]))
            number += len(self._threads) + 1
