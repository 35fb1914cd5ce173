"""Error replies, in one form, whether redis-py has read them or the page path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from redis import exceptions

_CODES: dict[type[exceptions.RedisError], str] = {
    exceptions.AskError: "ASK",  # before its base
    exceptions.MovedError: "MOVED",
    exceptions.TryAgainError: "TRYAGAIN",
    exceptions.MasterDownError: "MASTERDOWN",  # before its base
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.NoPermissionError: "NOPERM",
    exceptions.OutOfMemoryError: "OOM",
    exceptions.ReadOnlyError: "READONLY",
}
_FULL = frozenset({"OOM", "MISCONF", "NOREPLICAS"})
_PAGE_ONLY = frozenset({"WRONGTYPE"})
_STALE = frozenset(
    {
        "READONLY",
        "LOADING",
        "MASTERDOWN",
        "CLUSTERDOWN",
        "NOAUTH",
        "WRONGPASS",
        "UNBLOCKED",
    }
)


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The server refused one command. Nothing of it was carried out."""

    code: str
    """Its first word."""
    text: str

    @classmethod
    def of(cls, error: exceptions.ResponseError) -> ErrorReply:
        """From redis-py, which leaves out the codes that it has a class for."""
        text = str(error)
        for kind, code in _CODES.items():
            if isinstance(error, kind):
                return cls(code, text)
        return cls.of_line(text)

    @classmethod
    def of_line(cls, line: str) -> ErrorReply:
        code, _, text = line.partition(" ")
        return cls(code, text)

    @property
    def is_full(self) -> bool:
        """The server takes no writes now: it has no room, or may not write its own files."""
        return self.code in _FULL

    @property
    def is_redirection(self) -> bool:
        """Another server would do it."""
        return self.code in ("MOVED", "ASK", "READONLY")

    @property
    def is_stale(self) -> bool:
        """Another connection may lead to a server that would do it: this one has no future."""
        return self.code in _STALE

    @property
    def is_about_the_key(self) -> bool:
        """What lies under the key is no page."""
        return self.code in _PAGE_ONLY

    @property
    def target(self) -> str:
        """`host:port` of a redirection to one server; `:port` where the host is the same."""
        return self.text.rpartition(" ")[2]


class WrongReply(ConnectionAbortedError):
    """What came is not what was asked for: nothing that follows on this connection can be trusted."""


class Refused(Exception):
    """A command was refused in a way that concerns all others too."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(f"{reply.code} {reply.text}")


class _Unanswered:
    """What stands for a reply that did not come."""

    def __repr__(self) -> str:
        return "UNANSWERED"


UNANSWERED = _Unanswered()
Reply: TypeAlias = Any
"""int, bytes, None, a list of replies, `ErrorReply` or `UNANSWERED`."""
Command: TypeAlias = tuple[bytes | str | int | float, ...]
TIMEOUTS = (TimeoutError, exceptions.TimeoutError)
_ARRAY: type[Any] = list
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError)
"""What redis-py and our own readers meet in a reply that no server should send."""
FAILURES = (OSError, exceptions.RedisError, Refused)
"""What a connection may raise."""


def items_of(reply: Reply) -> list[Reply] | None:
    """Return the items of an array; None: it is something else."""
    return reply if isinstance(reply, _ARRAY) else None
