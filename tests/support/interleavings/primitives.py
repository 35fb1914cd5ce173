"""Locks, conditions, queues and threads whose operations are points of a scheduler."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from interleavings.scheduler import Scheduler, Task


class Lock:
    """A `threading.Lock`, or an RLock if it is reentrant."""

    def __init__(self, scheduler: Scheduler, *, reentrant: bool = False) -> None:
        self._scheduler = scheduler
        self._reentrant = reentrant
        self._owner: Task | None = None
        self._count = 0
        self._waiters: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002
        """Acquire the lock, as `threading.Lock` does."""
        scheduler = self._scheduler
        if not scheduler.running:
            return True
        if not (self._reentrant and self._owner is scheduler.current):
            scheduler.point("acquires a lock")
            end_s = None if timeout < 0 else scheduler.now_s + timeout
            while self._count:
                left_s = None if end_s is None else end_s - scheduler.now_s
                if not blocking or (left_s is not None and left_s <= 0):
                    return False
                scheduler.wait(self._waiters, left_s, "waits for a lock")
            self._owner = scheduler.current
        self._count += 1
        return True

    def release(self) -> None:
        """Release the lock."""
        if not self._scheduler.running:
            return
        if self._count == 0:
            self._scheduler.point("releases a lock that nobody holds")
            raise RuntimeError("release unlocked lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            self._scheduler.wake(self._waiters)
            self._scheduler.point("has released a lock")

    def locked(self) -> bool:
        """Return True while a thread holds the lock."""
        return bool(self._count)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # --- for conditions ------------------------------------------------------------------------------

    def is_owned(self) -> bool:
        """Return True if the current thread holds the lock."""
        return self._owner is self._scheduler.current

    def release_all(self) -> int:
        """Release the lock completely. Return how many times it was held. This is not a point."""
        count, self._count, self._owner = self._count, 0, None
        self._scheduler.wake(self._waiters)
        return count

    def acquire_all(self, count: int) -> None:
        """Hold the lock again as before `release_all`. This is a point only if the lock is held."""
        while self._count:
            self._scheduler.wait(self._waiters, None, "waits for a lock, at the end of a wait")
        self._owner, self._count = self._scheduler.current, count


class Condition:
    """A `threading.Condition`."""

    def __init__(self, scheduler: Scheduler, lock: Lock | None = None) -> None:
        scheduler.serial += 1
        self.serial = scheduler.serial
        self._scheduler = scheduler
        self._lock = lock or Lock(scheduler, reentrant=True)
        self._waiters: list[Task] = []
        self.acquire = self._lock.acquire
        self.release = self._lock.release
        self.locked = self._lock.locked

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until a notification or the timeout."""
        if not self._lock.is_owned():
            raise RuntimeError("cannot wait on un-acquired lock")
        count = self._lock.release_all()
        woken = self._scheduler.wait(self._waiters, timeout, "waits for a change")
        self._lock.acquire_all(count)
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until a predicate is true."""
        end_s = None if timeout is None else self._scheduler.now_s + timeout
        while not (result := predicate()):
            left_s = None if end_s is None else end_s - self._scheduler.now_s
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify(self, n: int = 1) -> None:
        """Wake some waiting threads."""
        if not self._scheduler.running:
            return
        if not self._lock.is_owned():
            raise RuntimeError("cannot notify on un-acquired lock")
        self._scheduler.wake(self._waiters, n)

    def notify_all(self) -> None:
        """Wake all waiting threads."""
        self.notify(len(self._waiters))


class SimpleQueue:
    """A `queue.SimpleQueue`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[Any] = deque()
        self._waiters: list[Task] = []

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:  # noqa: FBT001, FBT002
        """Add an item."""
        self._scheduler.point("puts an item")
        self._items.append(item)
        self._scheduler.wake(self._waiters, 1)
        self._scheduler.point("has put an item")

    def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: FBT001, FBT002
        """Return the oldest item.

        Raises:
            queue.Empty: The queue has no item, or gets none in time.
        """
        self._scheduler.point("gets an item")
        end_s = None if timeout is None else self._scheduler.now_s + timeout
        while not self._items:
            left_s = None if end_s is None else end_s - self._scheduler.now_s
            if not block or (left_s is not None and left_s <= 0):
                raise queue.Empty
            self._scheduler.wait(self._waiters, left_s, "waits for an item")
        return self._items.popleft()

    def get_nowait(self) -> Any:
        """Return the oldest item without waiting."""
        return self.get(block=False)

    def qsize(self) -> int:
        """Return how many items there are."""
        return len(self._items)

    def empty(self) -> bool:
        """Return True if there is no item."""
        return not self._items


class Thread:
    """A `threading.Thread`."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> None:
        self.name = name or "thread"
        self.daemon = bool(daemon)
        self.ident: int | None = None
        self._scheduler = scheduler
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self._task: Task | None = None

    def start(self) -> None:
        """Start the thread."""
        if self._task is not None:
            raise RuntimeError("threads can only be started once")
        self._task = self._scheduler.spawn(self.name, self.run)
        self.ident = self._task.number + 1
        self._scheduler.point(f"has started {self.name}")

    def run(self) -> None:
        """Call the target."""
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def is_alive(self) -> bool:
        """Return True from the start to the end of the thread."""
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread."""
        if self._task is None:
            raise RuntimeError("cannot join thread before it is started")
        if self._task is self._scheduler.current:
            raise RuntimeError("cannot join current thread")
        self._scheduler.point(f"joins {self.name}")
        end_s = None if timeout is None else self._scheduler.now_s + timeout
        while not self._task.done:
            left_s = None if end_s is None else end_s - self._scheduler.now_s
            if left_s is not None and left_s <= 0:
                return
            self._scheduler.wait(self._task.joiners, left_s, f"joins {self.name}")
