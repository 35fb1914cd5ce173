"""A resource of one process that concurrent calls share. It is closed after the last call."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.errors import StorageClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

T = TypeVar("T")


class CallGate:
    """A counter of the calls in flight in one process. `close` refuses later calls. Thread-safe.

    Either `close` or exactly one call of `end` returns True. The code that gets True releases the
    resource.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # faster to lock than the condition
        self._idle = threading.Condition(self._lock)
        self._calls = 0
        self._closed = False

    @property
    def calls(self) -> int:
        """The number of calls in flight."""
        return self._calls

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def begin(self) -> bool:
        """Count a call and return True: call `end` after the call. Return False after `close`."""
        with self._lock:
            self._calls += not self._closed
            return not self._closed

    def end(self) -> bool:
        """End a call. Return True if it was the last call after `close`."""
        with self._lock:
            self._calls -= 1
            if not self._calls:
                self._idle.notify_all()
            return self._closed and not self._calls

    def close(self) -> bool:
        """Refuse later calls. Return True if this is the first `close` and no call is in flight."""
        with self._lock:
            first, self._closed = not self._closed, True
            return first and not self._calls

    def wait_until_idle(self, limit_s: float) -> bool:
        """Wait until no call is in flight. Return False if a call still is after `limit_s`."""
        with self._lock:
            return self._idle.wait_for(lambda: not self._calls, limit_s)


class SharedResource(Generic[T]):
    """An environment, a mount or a session that is opened once for all calls of a storage. Thread-safe.

    `close` refuses later calls and does not wait. The last call in flight closes the resource, so no
    call loses it. A forked child makes its own resource, with no call in flight. See `ForkLocal` for
    the arguments.
    """

    def __init__(
        self,
        make: Callable[[], T],
        *,
        close: Callable[[T], None],
        abandon: Callable[[T], None] = lambda _: None,
    ) -> None:
        self._closed = False
        self._gates = ForkLocal(self._new_gate, close=lambda _: None)
        self._values = ForkLocal(make, close=close, abandon=abandon)

    @contextmanager
    def use(self) -> Generator[T, None, None]:
        """Use the resource for one call.

        Raises:
            StorageClosed: `close` was called.
        """
        gate = self._gates.get()
        if not gate.begin():
            raise StorageClosed("this storage was closed: open a new one")
        try:
            yield self._values.get()
        finally:
            if gate.end():
                self._values.close()

    def close(self) -> None:
        """Refuse later calls, and close the resource if no call is in flight. Idempotent."""
        self._closed = True
        if self._gates.get().close():
            self._values.close()

    def _new_gate(self) -> CallGate:
        gate = CallGate()
        if self._closed:  # it was closed before the fork
            gate.close()
        return gate
