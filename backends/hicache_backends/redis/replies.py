"""Replies that are not values: errors in one form, whether redis-py or the page path has read them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeAlias

from redis import exceptions

from hicache_backends.redis.access import Address

_CODES: dict[type[exceptions.RedisError], str] = {
    exceptions.AskError: "ASK",  # before its base class
    exceptions.MovedError: "MOVED",
    exceptions.TryAgainError: "TRYAGAIN",
    exceptions.MasterDownError: "MASTERDOWN",  # before its base class
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.NoPermissionError: "NOPERM",
    exceptions.OutOfMemoryError: "OOM",
    exceptions.ReadOnlyError: "READONLY",
}
_FULL = frozenset({"OOM", "MISCONF", "NOREPLICAS"})
_KEY_ONLY = frozenset({"WRONGTYPE"})
_REMEDIES = {
    "NOPERM": "give the user the rules that docs/backends/redis.md lists",
    "WRONGTYPE": "another program has keys with this prefix, so choose another prefix",
}
_FORBIDDEN = re.compile(r"run the '([a-z|-]+)' command")
_REDIRECTIONS = frozenset({"MOVED", "ASK", "READONLY"})
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
    """A refusal of one command. The server has carried out no part of the command."""

    code: str
    """The first word of the reply."""
    text: str

    @classmethod
    def from_exception(cls, error: exceptions.ResponseError) -> ErrorReply:
        """Return the reply that caused `error`. redis-py drops codes for which it has exceptions."""
        text = str(error)
        for kind, code in _CODES.items():
            if isinstance(error, kind):
                return cls(code, text)
        return cls.from_line(text)

    @classmethod
    def from_line(cls, line: str) -> ErrorReply:
        code, _, text = line.partition(" ")
        return cls(code, text)

    @property
    def is_full(self) -> bool:
        """True if the server accepts no writes: it has no memory left, or cannot write its files."""
        return self.code in _FULL

    @property
    def is_redirection(self) -> bool:
        """True if another server would carry out the command."""
        return self.code in _REDIRECTIONS

    @property
    def is_stale(self) -> bool:
        """True if a new connection may lead to a server that would carry out the command."""
        return self.code in _STALE

    @property
    def is_about_the_key(self) -> bool:
        """True if the value of the key is not a page."""
        return self.code in _KEY_ONLY

    def target(self, host: str) -> Address:
        """Return the server that ASK names. If it names only a port, the server is on `host`.

        Raises:
            ValueError: The reply names no server.
        """
        parsed: Any = exceptions.AskError(self.text)
        return Address.parse(f"{parsed.host}:{parsed.port}", default_host=host)


class WrongReply(ConnectionAbortedError):
    """A reply of an unexpected form. Later replies on its connection cannot be trusted."""


class Refused(Exception):
    """A refusal that concerns all commands of a batch."""

    def __init__(self, reply: ErrorReply) -> None:
        remedy = _REMEDIES.get(reply.code)
        if remedy and (command := _FORBIDDEN.search(reply.text)):
            remedy = f"add +{command[1]} to the ACL, or {remedy}"
        super().__init__(f"{reply.code} {reply.text}{f': {remedy}' if remedy else ''}")
        self.reply = reply
        self.advice = "" if remedy else None
        """As that of a `HiCacheError`."""


class _Unanswered:
    """The type of `UNANSWERED`."""

    def __repr__(self) -> str:
        return "UNANSWERED"


UNANSWERED = _Unanswered()
"""The placeholder for a reply that did not arrive."""
Reply: TypeAlias = Any
"""int, bytes, None, a list of replies, `ErrorReply` or `UNANSWERED`."""
Command: TypeAlias = tuple[bytes | str | int | float, ...]
TIMEOUTS = (TimeoutError, exceptions.TimeoutError)
_ARRAY: type[Any] = list
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError)
"""Exceptions that redis-py and our parsers raise for a reply that no server should send."""
FAILURES = (OSError, exceptions.RedisError, Refused)
"""Exceptions that a connection may raise."""


def items_of(reply: Reply) -> list[Reply] | None:
    """Return the items of an array, or None if `reply` is not an array."""
    return reply if isinstance(reply, _ARRAY) else None
