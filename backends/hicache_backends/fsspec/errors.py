"""What the exceptions of fifty client libraries mean."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from hicache_storage.errors import HiCacheError, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def says_missing(error: Exception) -> bool:
    """There is no such object."""
    return isinstance(error, _MISSING)


def says_full(error: Exception) -> bool:
    """There is no room for the object; others are not concerned."""
    return isinstance(error, OSError) and error.errno in _NO_ROOM


def says_down(error: Exception | None) -> bool:
    """The store did not answer: there is no saying what became of the object."""
    return error is not None and not says_missing(error) and not says_full(error)


def says_late(error: Exception) -> bool:
    """No answer in time, as Python or as the library calls it."""
    return isinstance(error, TimeoutError) or any(
        "timeout" in kind.__name__.lower() for kind in type(error).__mro__
    )


def failure(errors: Sequence[Exception], shown_url: str, timeout_s: float) -> HiCacheError:
    """What to raise where the store did not answer. Never a library's text: it may hold a secret."""
    for error in errors:
        if isinstance(error, HiCacheError):
            return error
    late = [error for error in errors if says_late(error)]
    if late:
        return StorageTimeout(f"fsspec: {shown_url} did not answer within {timeout_s:g} s")
    return StorageUnavailable(f"fsspec: {shown_url} cannot be used: {_brief(errors[0])}")


def _brief(error: Exception) -> str:
    name = type(error).__name__
    number = error.errno if isinstance(error, OSError) else None
    return f"{name} ({os.strerror(number)})" if isinstance(number, int) else name
