"""Take a lock with a time limit, although KeyboardInterrupt may come at any point."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import threading
    from collections.abc import Generator


@contextmanager
def held(lock: threading.RLock, limit_s: float) -> Generator[bool]:
    """Hold a lock. Yield False if another thread holds it for `limit_s`. Do not nest this.

    An interrupt right after `acquire`, or right before `release`, leaves the lock to this thread. Then
    the next call in this thread releases it. (`with lock` needs no such care, but waits without limit.)
    """
    try:
        _release(lock)
        lock.acquire(timeout=limit_s)
        yield _is_owned(lock)
    finally:
        _release(lock)


def _release(lock: threading.RLock) -> None:
    while _is_owned(lock):
        lock.release()


def _is_owned(lock: Any) -> bool:
    return bool(lock._is_owned())  # noqa: SLF001 - threading.Condition relies on it too
