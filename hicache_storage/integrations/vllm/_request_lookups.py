"""The answers of lookups, for each request of vLLM on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class RequestLookups:
    """Answers of the store, for each request. Not thread-safe: vLLM's lock guards it.

    A page whose load failed stays missing for its request. Otherwise vLLM would load it for ever.
    """

    def __init__(self) -> None:
        self._answers: dict[str, dict[bytes, bool | None]] = {}
        self._asked: dict[bytes, list[str]] = {}

    def ask(self, request: str, key: bytes) -> bool | None:
        """Return whether the store has the page; None while there is no answer.

        The first question of a request is kept for `take_asked`.
        """
        answers = self._answers.get(request)
        if answers is None:
            answers = self._answers[request] = {}
        if key not in answers:
            answers[key] = None
            self._asked.setdefault(key, []).append(request)
        return answers[key]

    def take_asked(self) -> dict[bytes, list[str]]:
        """Return the questions since the last call: the requests that asked, by key."""
        asked, self._asked = self._asked, {}
        return asked

    def answer(self, requests: Iterable[str], key: bytes, *, present: bool) -> None:
        """Record the answer of the store. A request that is over, or has an answer, is left out."""
        for request in requests:
            answers = self._answers.get(request)
            if answers is not None and answers.get(key, False) is None:
                answers[key] = present

    def mark_missing(self, request: str, keys: Iterable[bytes]) -> None:
        """Record that pages could not be loaded. A request that is over is left out."""
        answers = self._answers.get(request)
        if answers is not None:
            answers.update(dict.fromkeys(keys, False))

    def forget(self, request: str) -> dict[bytes, bool | None]:
        """Forget a request that is over. Return its answers."""
        return self._answers.pop(request, {})

    def clear(self) -> None:
        """Forget every answer: the requests ask again."""
        self._answers.clear()
        self._asked.clear()
