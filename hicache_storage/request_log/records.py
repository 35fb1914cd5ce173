"""A line of the explain log: one operation of one request, and the first page that it lacks."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from hicache_storage.request_log.reasons import Reason
from hicache_storage.scalars import check_integer, parse_float

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_ID_CHARACTERS = 200
"""A longer request id is cut."""


class Operation(enum.Enum):
    """The operation that a record is about."""

    PREFETCH = "prefetch"
    """A lookup and the loads that follow it, from the request's first question to its end."""
    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"
    """Pages that were to be written. Only stores that left pages out have a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One operation of one request on one rank."""

    at_s: float
    """The time of its end, in seconds since 1970."""
    engine: str
    """The engine: "sglang", "vllm", "lmcache" or "replay"."""
    rank: int
    operation: Operation
    request: str | None = None
    """The request's id; None where the engine does not tell it."""
    first_hash: str | None = None
    """The hash of the first page that was asked for."""
    asked_pages: int
    hit_pages: int
    """The pages that were found, loaded or stored. Of a prefetch: the length of the usable prefix."""
    l2_pages: int | None = None
    """Of these, the pages that were in host memory; None where the engine does not tell it."""
    page: int | None = None
    """The index of the first missing page; None where no page is missing."""
    page_hash: str | None = None
    """The hash of the first missing page."""
    pool: str | None = None
    """The pool that lacks the page; None where another rank lacks it, or no store was asked."""
    other_rank: int | None = None
    """The rank with the shortest prefix, where it is another rank."""
    reason: Reason | None = None
    """The reason for the first missing page; None where no page is missing."""
    reasons: Mapping[Reason, int] = field(default_factory=dict[Reason, int])
    """The number of missing pages of each reason, as far as they were asked for."""
    elapsed_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the record ready for JSON, without the fields that are None."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        found["operation"] = self.operation.value
        found["request"] = None if self.request is None else self.request[:MAX_ID_CHARACTERS]
        found["reason"] = None if self.reason is None else _name(self.reason)
        found["reasons"] = {_name(reason): pages for reason, pages in self.reasons.items()} or None
        for name in ("at_s", "elapsed_s"):
            found[name] = None if found[name] is None else round(found[name], 6)
        return {name: value for name, value in found.items() if value is not None}

    def line(self) -> str:
        """Return the record as a line of JSON."""
        return json.dumps(self.as_json(), separators=(",", ":")) + "\n"

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> RequestRecord:
        """Return the record that `as_json` has made. Fields of a later release are left out.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: The value is no record.
        """
        known = {each.name for each in fields(cls)}
        found = {name: value[name] for name in value if name in known}
        for name in _REQUIRED:
            found[name] = _OF_JSON[name](name, found[name])
        for name in _OF_JSON.keys() - _REQUIRED:
            if found.get(name) is not None:
                found[name] = _OF_JSON[name](name, found[name])
        found["operation"] = Operation(found["operation"])
        if found.get("reason") is not None:
            found["reason"] = Reason[found["reason"].upper()]
        found["reasons"] = {
            Reason[name.upper()]: count_of_json(name, pages)
            for name, pages in found.get("reasons", {}).items()
        }
        return cls(**found)


def dropped_line(pages: int, at_s: float, engine: str, rank: int) -> str:
    """Return the line that tells of records which were dropped."""
    told = {"at_s": round(at_s, 6), "engine": engine, "rank": rank, "dropped_records": pages}
    return json.dumps(told, separators=(",", ":")) + "\n"


def count_of_json(name: str, value: object) -> int:
    """Return a whole number from 0 on.

    Raises:
        ValueError, TypeError: The value is something else.
    """
    return check_integer(name, value, least=0)


def _time(name: str, value: object) -> float:
    at_s = parse_float(value)
    if not 0 <= at_s < _YEAR_10000_S:
        raise ValueError(f"{name} is no time")
    return at_s


def _seconds(_: str, value: object) -> float:
    return parse_float(value)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is no text")
    return value


_YEAR_10000_S = 253_402_300_800 - 1
"""Python's dates end before that year. The second is for rounding."""
_REQUIRED = frozenset({"at_s", "engine", "rank", "asked_pages", "hit_pages"})
_OF_JSON: dict[str, Callable[[str, object], object]] = {
    "at_s": _time,
    "elapsed_s": _seconds,
    **dict.fromkeys(("engine", "request", "first_hash", "page_hash", "pool"), _text),
    **dict.fromkeys(
        ("rank", "asked_pages", "hit_pages", "l2_pages", "page", "other_rank"), count_of_json
    ),
}


def _name(reason: Reason) -> str:
    return reason.name.lower()
