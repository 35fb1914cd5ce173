"""The names of a page store's counters, as `PageStore.stats` returns them and metrics show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from hicache_storage.page_store.results import Verdict

Direction: TypeAlias = Literal["load", "save"]
Answer: TypeAlias = Literal["present", "absent", "unanswered"]

DIRECTIONS: tuple[Direction, ...] = ("load", "save")
ANSWERS: tuple[Answer, ...] = ("present", "absent", "unanswered")
DELETED_PAGES = "deleted_pages"
WRONG_PAGES_DELETED = "wrong_pages_deleted"
MATCH_FAILED = "match_failed"
"""The number of exists calls that failed."""
BREAKER_OPENED = "breaker_opened"
"""How often the two breakers opened: the sum of the two counters below."""
READ_BREAKER_OPENED = "read_breaker_opened"
WRITE_BREAKER_OPENED = "write_breaker_opened"


def pages_counter(direction: Direction, verdict: Verdict) -> str:
    """Return the name of the counter for pages with `verdict`, such as "load_ok"."""
    return f"{direction}_{verdict.value}"


def answers_counter(answer: Answer) -> str:
    """Return the name of the counter for pages with `answer`, such as "match_present"."""
    return f"match_{answer}"


def nbytes_counter(direction: Direction) -> str:
    """Return the name of the counter for payload bytes, such as "load_nbytes"."""
    return f"{direction}_nbytes"
