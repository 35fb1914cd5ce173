"""Keep the answers of lookups, and what became of each hit, separately for each request of vLLM."""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING

from hicache_storage.request_log import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hicache_storage.integrations.vllm._engine import ReqContext


NOT_HELD = frozenset({Reason.NO_HOST_SLOT, Reason.EVICTED})
"""The reasons why a page is missing that the store has."""


class PageState(enum.Enum):
    """The state of a page that is not missing."""

    ASKED = enum.auto()
    """The store has not answered yet."""
    PRESENT = enum.auto()
    """The store has the page."""
    OFFERED = enum.auto()
    """vLLM was given the hit. Without a row for the page, vLLM does not load it."""
    LOADED = enum.auto()
    """vLLM has given a row to the page, and the store was asked to fill it."""


class RequestPages:
    """The pages of a request, from its first lookup until it ends or is preempted."""

    __slots__ = ("began_s", "context", "ended_s", "has_lost", "has_rows", "states")

    def __init__(self, context: ReqContext) -> None:
        self.context = context
        self.states: dict[bytes, PageState | Reason] = {}
        """A reason means that the page is missing."""
        self.began_s = self.ended_s = time.monotonic()
        self.has_rows = False
        """Whether vLLM has loaded a page for this request."""
        self.has_lost = False
        """Whether a page became missing after it was a hit."""

    def reasons(self) -> dict[bytes, Reason]:
        """Return why each missing page is missing, for a request that has ended."""
        at_end = {PageState.ASKED: Reason.CANCELLED, PageState.OFFERED: Reason.NO_HOST_SLOT}
        return {
            key: reason
            for key, state in self.states.items()
            if (reason := state if isinstance(state, Reason) else at_end.get(state)) is not None
        }

    def end_of(self, key: bytes) -> int | None:
        """Return where a page ends in its prompt, in tokens, or None if this vLLM does not tell."""
        position = getattr(self.context, "get_offload_key_position", None)
        return None if position is None else position(key)

    def unreached(self, missing: Iterable[bytes], found: Iterable[bytes]) -> int:
        """Count the pages `found` behind the first of the `missing` ones, which vLLM cannot use."""
        gap = min((end for key in missing if (end := self.end_of(key)) is not None), default=None)
        return 0 if gap is None else sum((self.end_of(key) or 0) >= gap for key in found)

    def unused_loads(self) -> int:
        """Count the pages that were read for the request, and that it could not use."""
        if not self.has_lost:
            return 0
        reasons = self.reasons()
        loaded = [key for key, state in self.states.items() if state is PageState.LOADED]
        evicted = sum(reason is Reason.EVICTED for reason in reasons.values())
        return evicted + self.unreached(reasons, loaded)


class RequestLookups:
    """The pages of each request. Not thread-safe: vLLM's lock guards it.

    vLLM gets a hit of a page once for each request. If it asks again, it had no row for the page, or
    has evicted the page before the request began. Loading it again could evict the next page of the
    same request, and so on forever, so the page is missing from then on. If a load fails, the page
    stays missing, too.
    """

    def __init__(self) -> None:
        self._requests: dict[str, RequestPages] = {}
        self._asked: dict[bytes, list[str]] = {}

    def ask(self, context: ReqContext, key: bytes) -> bool | None:
        """Return whether vLLM can load a page from the store, or None until there is an answer.

        The first call for each page of a request adds a question to `take_asked`.
        """
        pages = self._requests.get(context.req_id)
        if pages is None:
            pages = self._requests[context.req_id] = RequestPages(context)
        state = pages.states.get(key)
        if state is PageState.PRESENT:
            pages.states[key] = PageState.OFFERED
            return True
        if state is None:
            state = pages.states[key] = PageState.ASKED
            self._asked.setdefault(key, []).append(context.req_id)
        if state is PageState.LOADED:
            pages.states[key] = Reason.EVICTED
            pages.has_lost = True
        if state is PageState.OFFERED:  # without rows of its own, the request cannot evict them
            return not pages.has_rows
        return None if state is PageState.ASKED else False

    def take_asked(self) -> dict[bytes, list[str]]:
        """Return the keys that were asked for since the last call, each with the requests that asked."""
        asked, self._asked = self._asked, {}
        return asked

    def answer(self, requests: Iterable[str], key: bytes, missing: Reason | None = None) -> None:
        """Record the store's answer: why the page is missing, or None if the store has it.

        Skip requests that have ended or have an answer.
        """
        for request in requests:
            pages = self._requests.get(request)
            if pages is not None and pages.states.get(key) is PageState.ASKED:
                pages.states[key] = PageState.PRESENT if missing is None else missing
                pages.ended_s = time.monotonic()

    def mark_loaded(self, request: str, keys: Iterable[bytes]) -> None:
        """Record that the store was asked to fill rows of vLLM with pages."""
        pages = self._requests.get(request)
        if pages is not None:
            pages.states.update(dict.fromkeys(keys, PageState.LOADED))
            pages.has_rows = True

    def mark_missing(self, request: str, reasons: Mapping[bytes, Reason]) -> None:
        """Record why pages could not be loaded. Do nothing if the request has ended."""
        pages = self._requests.get(request)
        if pages is not None:
            pages.states.update(reasons)
            pages.has_lost = True
            pages.ended_s = time.monotonic()

    def forget(self, request: str) -> RequestPages | None:
        """Forget a request that has ended or is preempted, and return its pages.

        A request that goes on afterwards asks for every page again.
        """
        return self._requests.pop(request, None)

    def clear(self) -> None:
        """Forget every answer, so that requests ask again."""
        self._requests.clear()
        self._asked.clear()
