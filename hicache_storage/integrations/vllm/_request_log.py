"""Record why pages of a vLLM request were missing, and how many it could not use."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from hicache_storage.integrations.vllm._request_lookups import NOT_HELD
from hicache_storage.integrations.vllm._rows import GROUP_NBYTES
from hicache_storage.request_log import Operation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.integrations.vllm._request_lookups import RequestPages
    from hicache_storage.keys import KeySpace
    from hicache_storage.request_log import ExplainLog


def log_request(log: ExplainLog, pages: RequestPages, spaces: Mapping[int, KeySpace]) -> None:
    """Log a request that has ended or is preempted.

    It gets one record, because vLLM looks up pages several times and loads only some.
    """
    log.add_later(Operation.PREFETCH, partial(_fields, pages, spaces))


def _fields(pages: RequestPages, spaces: Mapping[int, KeySpace]) -> dict[str, Any]:
    reasons = pages.reasons()
    missing = list(reasons)
    unreached = pages.unreached(missing, (key for key in pages.states if key not in reasons))
    lost = sum(reason in NOT_HELD for reason in reasons.values())
    found: dict[str, Any] = {
        "request": pages.context.req_id,
        "first_hash": _hash(next(iter(pages.states))),
        "asked_pages": len(pages.states),
        "hit_pages": len(pages.states) - len(missing) - unreached,
        "unused_pages": lost + unreached,
        "reasons": dict(Counter(reasons.values())),
        "elapsed_s": pages.ended_s - pages.began_s,
    }
    if missing:
        places = [_page(key, spaces, pages) for key in missing]
        first = min(range(len(missing)), key=lambda place: (places[place] or 0, place))
        space = spaces.get(_group(missing[first]))
        found |= {
            "page": places[first],
            "page_hash": _hash(missing[first]),
            "pool": None if space is None else space.pool,
            "reason": reasons[missing[first]],
        }
    return found


def _page(key: bytes, spaces: Mapping[int, KeySpace], pages: RequestPages) -> int | None:
    """Return the index of a page in its prompt, or None if this vLLM does not expose the index."""
    end = pages.end_of(key)
    space = spaces.get(_group(key))
    return None if end is None or space is None else (end - 1) // space.page_tokens


def _group(key: bytes) -> int:
    return int.from_bytes(key[-GROUP_NBYTES:], "big")


def _hash(key: bytes) -> str:
    return key[:-GROUP_NBYTES].hex()
