"""Record why pages of a vLLM request are missing, from its first lookup to its end."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from hicache_storage.integrations.vllm._rows import GROUP_NBYTES
from hicache_storage.request_log import Operation, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hicache_storage.integrations.vllm._engine import ReqContext
    from hicache_storage.keys import KeySpace
    from hicache_storage.request_log import ExplainLog


class _Story:
    __slots__ = ("began_s", "ended_s", "reasons")

    def __init__(self) -> None:
        self.began_s = self.ended_s = time.monotonic()
        self.reasons: dict[bytes, Reason] = {}


class RequestReasons:
    """The reasons why each request's pages are missing. Not thread-safe: vLLM's lock guards it.

    A request gets one record, at its end, because vLLM looks up pages several times and loads only some.
    """

    def __init__(self, log: ExplainLog) -> None:
        self._log = log
        self._stories: dict[str, _Story] = {}

    def begin(self, request: str) -> None:
        """Note that vLLM has looked up a page of a request."""
        if request not in self._stories:
            self._stories[request] = _Story()

    def note(self, requests: Iterable[str], key: bytes, reason: Reason | None) -> None:
        """Note why a page is missing.

        A reason of None means that the store has the page, or has answered that it lacks the page.
        """
        for request in requests:
            story = self._stories.get(request)
            if story is not None:
                story.ended_s = time.monotonic()
                if reason is not None:
                    story.reasons.setdefault(key, reason)

    def finish(
        self,
        context: ReqContext,
        answers: Mapping[bytes, bool | None],
        spaces: Mapping[int, KeySpace],
    ) -> None:
        """Log a request that has ended, with the last answers for its pages."""
        story = self._stories.pop(context.req_id, None)
        if story is not None and answers:
            fields = partial(_fields, story, answers, spaces, context)
            self._log.add_later(Operation.PREFETCH, fields)

    def clear(self) -> None:
        """Forget every request."""
        self._stories.clear()


def _fields(
    story: _Story,
    answers: Mapping[bytes, bool | None],
    spaces: Mapping[int, KeySpace],
    context: ReqContext,
) -> dict[str, Any]:
    missing = [key for key, present in answers.items() if not present]
    reasons = [
        Reason.CANCELLED if answers[key] is None else story.reasons.get(key, Reason.ABSENT)
        for key in missing
    ]
    found: dict[str, Any] = {
        "request": context.req_id,
        "first_hash": _hash(next(iter(answers))),
        "asked_pages": len(answers),
        "hit_pages": len(answers) - len(missing),
        "reasons": dict(Counter(reasons)),
        "elapsed_s": story.ended_s - story.began_s,
    }
    if missing:
        pages = [_page(key, spaces, context) for key in missing]
        first = min(range(len(missing)), key=lambda place: (pages[place] or 0, place))
        space = spaces.get(_group(missing[first]))
        found |= {
            "page": pages[first],
            "page_hash": _hash(missing[first]),
            "pool": None if space is None else space.pool,
            "reason": reasons[first],
        }
    return found


def _page(key: bytes, spaces: Mapping[int, KeySpace], context: ReqContext) -> int | None:
    """Return the index of a page in its prompt, or None if this vLLM does not expose the index."""
    position: Callable[[bytes], int | None] | None = getattr(
        context, "get_offload_key_position", None
    )
    end = None if position is None else position(key)
    space = spaces.get(_group(key))
    return None if end is None or space is None else (end - 1) // space.page_tokens


def _group(key: bytes) -> int:
    return int.from_bytes(key[-GROUP_NBYTES:], "big")


def _hash(key: bytes) -> str:
    return key[:-GROUP_NBYTES].hex()
