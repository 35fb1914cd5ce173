"""One line of the explain log: an operation of a request, and the first page that was missing."""

from __future__ import annotations

import enum
import json
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from hicache_storage.request_log.reasons import Reason

MAX_ID_CHARACTERS = 200
"""Longer request ids are cut."""


class Operation(enum.Enum):
    """The operation that a record describes."""

    PREFETCH = "prefetch"
    """A lookup and the loads that follow it, from the first question to the last answer."""
    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"
    """A write of pages. It gets a record only if it left out pages."""


_YEAR_10000_S = 253_402_300_800 - 1
"""Python's dates end before the year 10000. One second is subtracted for rounding."""
_Count = Annotated[int, Field(strict=True, ge=0)]
_Rounded = PlainSerializer(lambda seconds: round(seconds, 6))
_Time = Annotated[float, Field(strict=True, ge=0, lt=_YEAR_10000_S), _Rounded]
_Seconds = Annotated[float, Field(strict=True, allow_inf_nan=False), _Rounded]
_RequestId = Annotated[str, PlainSerializer(lambda text: text[:MAX_ID_CHARACTERS])]
_NamedReason = Annotated[
    Reason,
    BeforeValidator(lambda value: Reason[value.upper()] if isinstance(value, str) else value),
    PlainSerializer(lambda reason: reason.name.lower()),
]


class RequestRecord(BaseModel):
    """One operation of one request on one rank. Fields that a later release adds are ignored."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="ignore")

    at_s: _Time
    """When the operation ended, in seconds since 1970."""
    engine: str
    """The engine: "sglang", "vllm", "lmcache" or "replay"."""
    rank: _Count
    operation: Operation
    request: _RequestId | None = None
    """The request's id. None if the engine does not report the id."""
    first_hash: str | None = None
    """The hash of the first page asked for."""
    asked_pages: _Count
    hit_pages: _Count
    """How many pages were found, loaded or stored. For a prefetch, the length of the usable prefix."""
    unused_pages: _Count = 0
    """How many pages storage had besides, which were of no use: host memory had no place for them, or
    an earlier page was missing."""
    l2_pages: _Count | None = None
    """How many of the hit pages were in host memory. None if the engine does not report that."""
    page: _Count | None = None
    """The index of the first missing page. None if no page is missing."""
    page_hash: str | None = None
    """The hash of the first missing page."""
    pool: str | None = None
    """The pool that lacks the page. None if another rank lacks it, or no store was asked."""
    other_rank: _Count | None = None
    """The rank with the shortest prefix, if it is a different rank."""
    reason: _NamedReason | None = None
    """The reason for the first missing page. None if no page is missing."""
    reasons: dict[_NamedReason, _Count] = Field(default_factory=dict[Reason, int])
    """How many of the pages asked for are missing, for each reason."""
    elapsed_s: _Seconds | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the record ready for JSON, leaving out fields that are None."""
        found = self.model_dump(mode="json", exclude_none=True)
        return {name: value for name, value in found.items() if value != {}}

    def line(self) -> str:
        """Return the record as a line of JSON."""
        return json.dumps(self.as_json(), separators=(",", ":")) + "\n"


def dropped_line(pages: int, at_s: float, engine: str, rank: int) -> str:
    """Return the line that reports dropped records."""
    told = {"at_s": round(at_s, 6), "engine": engine, "rank": rank, "dropped_records": pages}
    return json.dumps(told, separators=(",", ":")) + "\n"
