"""Limit how many bytes concurrent calls use."""

from __future__ import annotations

import threading


class ByteLimit:
    """A limit on the bytes that calls use at once. Callers wait until their bytes fit. Thread-safe."""

    def __init__(self, limit_nbytes: int | None) -> None:
        """Start with no bytes in use. With a limit of None, only count them."""
        self.limit_nbytes = limit_nbytes
        self.nbytes: int = 0
        """The number of bytes in use now."""
        self._changed = threading.Condition()
        self._closed = False

    def acquire(self, nbytes: int, timeout_s: float) -> bool:
        """Wait until `nbytes` more fit. Return False at the timeout, or after `close`.

        If no bytes are in use, a caller may take even more than the limit.
        """
        with self._changed:
            fits = self._changed.wait_for(lambda: self._closed or self._fits(nbytes), timeout_s)
            is_acquired = fits and not self._closed
            self.nbytes += nbytes if is_acquired else 0
            return is_acquired

    def release(self, nbytes: int) -> None:
        """Give back `nbytes` that `acquire` took."""
        with self._changed:
            self.nbytes -= nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse all callers from now on, including callers that already wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        limit = self.limit_nbytes
        return limit is None or not self.nbytes or self.nbytes + nbytes <= limit
