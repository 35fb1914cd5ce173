"""Every exception that the SDK raises. Each has the name of what its caller can do about it.

    HiCacheError
    ├── ConfigError (ValueError)              change the configuration
    │   └── NoSuchStore (ValueError)          open it for writing, which makes it
    ├── UnknownBackend (LookupError)          choose another name
    ├── BackendNotInstalled (ImportError)     install the extra that it names
    ├── StorageUnavailable (ConnectionError)  treat it as a miss, try again later
    ├── StorageTimeout (TimeoutError)         treat it as a miss, try again later
    ├── StorageClosed (RuntimeError)          open a new storage
    ├── UnsupportedOperation                  look at the capabilities first
    └── CorruptPage                           treat it as a miss, delete the page

A miss is no exception: it is `False`.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_SHOWN = 250
# A URL has "://", or ":/" once `Path` has read it; those of ZeroMQ hold no secret. JSON and YAML have
# braces, quotes and ": ".
_OF_CONFIGS = re.compile(r"""(?<!^tcp)(?<!^ipc)(?<!^inproc):/|[{}"]|: """)


class HiCacheError(Exception):
    """The root of all errors of this package."""


class ConfigError(HiCacheError, ValueError):
    """A configuration is wrong. The message names the field, never a secret."""


class NoSuchStore(ConfigError):
    """There is no store for a program that only looks. To open it for writing would make one."""


class UnknownBackend(HiCacheError, LookupError):
    """No backend has this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.choices: list[str] = sorted(known)
        super().__init__(name, self.choices)  # `args` are what pickle calls __init__ with

    def __str__(self) -> str:
        return (
            f"unknown storage backend {shown(self.name)!r}{did_you_mean(self.name, self.choices)}"
        )


class BackendNotInstalled(HiCacheError, ImportError):
    """The backend exists, but a library that it needs does not."""


class StorageUnavailable(HiCacheError, ConnectionError):
    """The store cannot be reached."""


class StorageTimeout(HiCacheError, TimeoutError):
    """The store was reached, and did not answer in time."""


class StorageClosed(HiCacheError, RuntimeError):
    """The storage was closed. Only `close` may be called on it."""


class UnsupportedOperation(HiCacheError):
    """The storage does not declare the capability that this operation needs."""


class CorruptPage(HiCacheError):
    """A stored page is not the requested one.

    `reason` is one of `corrupt`, `wrong_key`, `wrong_size`: the names of the page store's counters.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def shown(text: object) -> str:
    """Return a name, path or value that somebody gave, as a message may show it, or `***`.

    A config or a URL that was given in its place may hold a secret. All other texts are too long to
    read, or would move the terminal's cursor.
    """
    given = str(text)
    is_plain = given.isprintable() and len(given) <= _MAX_SHOWN and not _OF_CONFIGS.search(given)
    return given if is_plain else "***"


def did_you_mean(name: str, choices: list[str]) -> str:
    """Return the end of a message about an unknown name: the nearest choice, or all of them."""
    close = difflib.get_close_matches(name, choices, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; choose one of {', '.join(choices)}" if choices else ""
