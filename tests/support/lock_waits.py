"""Counts the calls after which a thread waits for the interpreter lock."""

from __future__ import annotations

import sqlite3
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

_MODULES = frozenset({"posix", "fcntl", "hicache_storage.native._native"})
_KEEP_THE_LOCK = frozenset(
    {"fspath", "getpid", "page_files", "page_trailers", "write_frames", "check_frames"}
)


def lock_waits(work: Callable[[], object]) -> Counter[str]:
    """Return how often `work` calls C functions that give up the interpreter lock, by name.

    Only calls of this thread count: system calls on files, calls of the data plane and of SQLite.
    """
    calls: Counter[str] = Counter()

    def count(_: object, event: str, function: Any) -> None:
        if event != "c_call":
            return
        if function.__module__ in _MODULES:
            calls[function.__name__] += function.__name__ not in _KEEP_THE_LOCK
        elif isinstance(function.__self__, (sqlite3.Connection, sqlite3.Cursor)):
            calls[function.__name__] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return +calls
