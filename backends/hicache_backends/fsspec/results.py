"""Map the results of single pages to the verdicts and errors of a call.

fsspec has fifty client libraries, and each has its own exceptions. Our messages never quote a
library's text, because it may contain a token or a signed URL.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

from hicache_storage.backend_support.answers import answers_of
from hicache_storage.errors import HiCacheError, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.fsspec.executors import Result
    from hicache_storage.backend_support.counters import Counters

MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class ResultMapper:
    """A mapper of results to verdicts. It counts failures, and raises if a store did not answer."""

    def __init__(self, counters: Counters, shown_url: str, timeout_s: float) -> None:
        self._counters = counters
        self._shown_url = shown_url
        self._timeout_s = timeout_s

    def found(self, results: Sequence[Result[bool]]) -> list[bool]:
        """Return the verdicts of an `exists` call. A failure is no answer.

        Raises:
            StorageTimeout, StorageUnavailable: The store answered for no page.
        """
        self.check_any_answered(results)
        return answers_of(
            [None if is_outage(result.error) else result.value is True for result in results]
        )

    def removed(self, results: Sequence[Result[None]]) -> list[bool]:
        """Return the verdicts of a `delete` call. A page that was missing counts as deleted.

        Raises:
            StorageTimeout, StorageUnavailable: The store answered for no page.
        """
        self.check_any_answered(results)
        return [result.error is None or is_missing(result.error) for result in results]

    def stored(self, results: Sequence[Result[None]]) -> list[bool]:
        """Return the verdicts of a `set` call. False: the page is not stored, and will not appear later.

        Raises:
            StorageTimeout, StorageUnavailable: A page failed, and may or may not be stored.
        """
        errors = [result.error for result in results if result.error is not None]
        failed = self._count([error for error in errors if not is_no_space(error)])
        if failed:
            raise self.failure(failed)
        verdicts = [result.error is None for result in results]
        self._counters.add("refused_no_space", verdicts.count(False))
        return verdicts

    def check_any_answered(self, results: Sequence[Result[Any]]) -> None:
        """Raise if there are results, but none of them is an answer."""
        errors = [result.error for result in results if result.error is not None]
        failed = self._count([error for error in errors if is_outage(error)])
        if failed and len(failed) == len(results):
            raise self.failure(failed)

    def check_all_succeeded(self, results: Sequence[Result[Any]]) -> None:
        """Raise if any result is an error, because a listing must not leave out what is unknown."""
        failed = self._count([one.error for one in results if one.error is not None])
        if failed:
            raise self.failure(failed)

    def failure(self, errors: Sequence[Exception]) -> HiCacheError:
        """Return the error to raise for errors of the store. Raise it without its cause."""
        for error in errors:
            if isinstance(error, HiCacheError):
                return error
        if any(map(is_timeout, errors)):
            return StorageTimeout(
                f"fsspec: {self._shown_url} did not answer within {self._timeout_s:g} s"
            )
        return StorageUnavailable(
            f"fsspec: {self._shown_url} cannot be used: {_kind_of(errors[0])}"
        )

    def _count(self, failed: list[Exception]) -> list[Exception]:
        timeouts = sum(map(is_timeout, failed))
        self._counters.add("timeouts", timeouts)
        self._counters.add("io_errors", len(failed) - timeouts)
        return failed


def is_missing(error: Exception) -> bool:
    """Return True if the file does not exist."""
    return isinstance(error, MISSING)


def is_no_space(error: Exception) -> bool:
    """Return True if there is no space for the file. Smaller files may still fit."""
    return isinstance(error, OSError) and error.errno in _NO_SPACE


def is_outage(error: Exception | None) -> bool:
    """Return True if the store did not answer, so that we know nothing about the file."""
    return error is not None and not is_missing(error) and not is_no_space(error)


def is_timeout(error: Exception) -> bool:
    """Return True for a timeout of Python or of a client library."""
    return isinstance(error, TimeoutError) or any(
        "timeout" in kind.__name__.lower() for kind in type(error).__mro__
    )


def _kind_of(error: Exception) -> str:
    name = type(error).__name__
    number = error.errno if isinstance(error, OSError) else None
    return f"{name} ({os.strerror(number)})" if isinstance(number, int) else name
