"""Every exception that the SDK raises, and what you can do about each.

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

A miss is not an exception: it is `False`.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

INSTALLED_FROM = "."
"""What `pip install` gets: a clone, because no index has a release. docs/releasing.md changes it."""
_MAX_SHOWN = 250
# Marks of a URL, JSON or YAML. `Path` turns the "://" of a URL into ":/". URLs of ZeroMQ are allowed,
# because they hold no secret.
_OF_CONFIGS = re.compile(r"""(?<!^tcp)(?<!^ipc)(?<!^inproc):/|[{}"]|: """)


class HiCacheError(Exception):
    """The base class of all errors of this package.

    Examples:
        >>> try:
        ...     raise StorageUnavailable("acme: connection refused")
        ... except HiCacheError:
        ...     print("miss")
        miss
    """

    def __init__(self, *args: object, advice: str | None = None, **fields: Any) -> None:
        """Describe the error. `fields` are those of the built-in class, as `name` of ImportError."""
        super().__init__(*args, **fields)
        self.advice = advice
        """What an operator should do, which the verbs of `hicache` show. "": the message says it. None:
        the code that raised the error does not know."""


def advice_about(error: BaseException | None) -> str | None:
    """Return the advice of an error, or of the nearest error of this package that caused it and has one.

    Examples:
        >>> advice_about(StorageUnavailable("no store", advice="mount it"))
        'mount it'
    """
    while isinstance(error, HiCacheError):
        if error.advice is not None:
            return error.advice
        error = error.__cause__
    return None


class ConfigError(HiCacheError, ValueError):
    """A configuration is wrong. The message names the field, and never contains a secret.

    Examples:
        >>> from hicache_storage import open_storage
        >>> open_storage("memory", {"capacity": 1})
        Traceback (most recent call last):
        hicache_storage.errors.ConfigError: memory: unknown field 'capacity'...
    """


class NoSuchStore(ConfigError):
    """A read-only program named a store that does not exist. Opening it for writing would create it.

    Examples:
        >>> from hicache_storage import open_storage
        >>> try:
        ...     open_storage("file", {"path": "/no/such/store"}, read_only=True)
        ... except NoSuchStore:
        ...     print("check the path")
        check the path
    """


class UnknownBackend(HiCacheError, LookupError):
    """No backend has this name.

    Examples:
        >>> from hicache_storage import open_storage
        >>> try:
        ...     open_storage("memroy")
        ... except UnknownBackend as error:
        ...     print("memory" in error.choices)
        True
    """

    def __init__(self, name: str, known: Iterable[str], where: str = "") -> None:
        """Describe the error. `where` is the place in a config that has the name."""
        self.name = name
        self.choices: list[str] = sorted(known)
        self.where = where
        super().__init__(name, self.choices, where)  # `args` are what pickle calls __init__ with

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        hint = did_you_mean(self.name, self.choices)
        return f"{place}unknown storage backend {shown(self.name)!r}{hint}"


class BackendNotInstalled(HiCacheError, ImportError):
    """The backend exists, but a library that it needs is not installed.

    Examples:
        >>> from hicache_storage import open_storage
        >>> mine = {"backend_name": "mine", "module_path": "not_installed", "class_name": "Mine"}
        >>> try:
        ...     open_storage("dynamic", mine)
        ... except BackendNotInstalled as error:
        ...     print("not_installed" in str(error))
        True
    """


class StorageUnavailable(HiCacheError, ConnectionError):
    """The store cannot be reached. Count a miss, and try again later.

    Examples:
        >>> issubclass(StorageUnavailable, ConnectionError)
        True
    """


class StorageTimeout(HiCacheError, TimeoutError):
    """The store was reached but did not answer in time. Count a miss, and try again later.

    Examples:
        >>> issubclass(StorageTimeout, TimeoutError)
        True
    """


class StorageClosed(HiCacheError, RuntimeError):
    """The storage was closed. Only `close` may be called on it now.

    Examples:
        >>> from hicache_storage import open_storage
        >>> storage = open_storage("memory")
        >>> storage.close()
        >>> try:
        ...     storage.stats()
        ... except StorageClosed:
        ...     print("open a new one")
        open a new one
    """


class UnsupportedOperation(HiCacheError):
    """The storage does not declare the capability that the operation needs.

    Examples:
        >>> from hicache_storage import open_storage
        >>> with open_storage("memory", read_only=True) as storage:
        ...     try:
        ...         storage.remove_space("0" * 32)
        ...     except UnsupportedOperation:
        ...         print("read-only")
        read-only
    """


class CorruptPage(HiCacheError):
    """A stored page is not the page that was requested.

    `reason` is `corrupt`, `wrong_key` or `wrong_size`, as in the names of the page store's counters.

    Examples:
        >>> CorruptPage("wrong_size", "4 bytes, not 8").reason
        'wrong_size'
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def shown(text: object) -> str:
    """Return a name, path or value in a form that is safe to show in a message, or `***`.

    `***` replaces a config or a URL, which may contain a secret, and text that is too long to read or
    that would move the terminal's cursor.
    """
    given = str(text)
    is_plain = given.isprintable() and len(given) <= _MAX_SHOWN and not _OF_CONFIGS.search(given)
    return given if is_plain else "***"


def did_you_mean(name: str, choices: list[str]) -> str:
    """Return the end of a message about an unknown name: the closest choice, or all choices."""
    close = difflib.get_close_matches(name, choices, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; choose one of {', '.join(choices)}" if choices else ""


def install_command(extra: str | None) -> str:
    """Return the command that installs the SDK with an extra, for a message about a missing library."""
    place = " (in a clone of hicache-storage)" if INSTALLED_FROM == "." else ""
    return f'pip install "{INSTALLED_FROM}{f"[{extra}]" if extra else ""}"{place}'
