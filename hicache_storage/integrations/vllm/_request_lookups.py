"""Keep the answers of lookups separately for each request of vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class RequestLookups:
    """The store's answers for each request. Not thread-safe: vLLM's lock guards it.

    If a load fails, the page stays missing for its request. Otherwise vLLM would load it forever.
    """

    def __init__(self) -> None:
        self._answers: dict[str, dict[bytes, bool | None]] = {}
        self._asked: dict[bytes, list[str]] = {}

    def ask(self, request: str, key: bytes) -> bool | None:
        """Return whether the store has a page, or None until there is an answer.

        The first call for each page of a request adds a question to `take_asked`.
        """
        answers = self._answers.get(request)
        if answers is None:
            answers = self._answers[request] = {}
        if key not in answers:
            answers[key] = None
            self._asked.setdefault(key, []).append(request)
        return answers[key]

    def take_asked(self) -> dict[bytes, list[str]]:
        """Return the keys that were asked for since the last call, each with the requests that asked."""
        asked, self._asked = self._asked, {}
        return asked

    def answer(self, requests: Iterable[str], key: bytes, *, present: bool) -> None:
        """Record the store's answer. Skip requests that have ended or have an answer."""
        for request in requests:
            answers = self._answers.get(request)
            if answers is not None and answers.get(key, False) is None:
                answers[key] = present

    def mark_missing(self, request: str, keys: Iterable[bytes]) -> None:
        """Record that pages could not be loaded. Do nothing if the request has ended."""
        answers = self._answers.get(request)
        if answers is not None:
            answers.update(dict.fromkeys(keys, False))

    def forget(self, request: str) -> dict[bytes, bool | None]:
        """Forget a request that has ended. Return its answers."""
        return self._answers.pop(request, {})

    def clear(self) -> None:
        """Forget every answer, so that requests ask again."""
        self._answers.clear()
        self._asked.clear()
