"""A limit of the bytes that calls use at the same time."""

from __future__ import annotations

import threading


class ByteLimit:
    """The bytes in use, with a limit that callers wait for. Thread-safe."""

    def __init__(self, limit_nbytes: int | None) -> None:
        """Start with no byte in use. None: count them only."""
        self.limit_nbytes = limit_nbytes
        self.nbytes: int = 0
        """The bytes in use now."""
        self._changed = threading.Condition()
        self._closed = False

    def acquire(self, nbytes: int, timeout_s: float) -> bool:
        """Wait until `nbytes` more fit. Return False at the timeout, or after `close`.

        A caller that is alone gets more than the limit, too.
        """
        with self._changed:
            fits = self._changed.wait_for(lambda: self._closed or self._fits(nbytes), timeout_s)
            is_acquired = fits and not self._closed
            self.nbytes += nbytes if is_acquired else 0
            return is_acquired

    def release(self, nbytes: int) -> None:
        """End `acquire`."""
        with self._changed:
            self.nbytes -= nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse all callers from now on, and those that wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        limit = self.limit_nbytes
        return limit is None or not self.nbytes or self.nbytes + nbytes <= limit
