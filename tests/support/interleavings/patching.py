"""Replaces the standard library's threads, locks and clocks for the threads of a scheduler."""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, _base
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from hicache_storage.host_pool import memory
from interleavings.primitives import Condition, Lock, SimpleQueue, Thread
from interleavings.scheduler import Scheduler

_EPOCH_S = 1_700_000_000
_RUNS_PER_COLLECTION = 50


class Patches:
    """The replacements. They affect the thread that made them, while a scheduler `runs`.

    Objects that were made before, such as a lock of a module, are still those of the operating
    system. The code under test must not hold such a lock at a point.
    """

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self._scheduler: Scheduler | None = None
        self._runs = 0

    @contextmanager
    def runs(self, scheduler: Scheduler) -> Generator[None]:
        """Replace everything during the `with` block, for one run."""
        self._scheduler = scheduler
        self._runs += 1
        if self._runs % _RUNS_PER_COLLECTION == 0:
            gc.collect()
        try:
            yield
        finally:
            self._scheduler = None

    def scheduler(self) -> Scheduler | None:
        """Return the scheduler of the calling thread, or None."""
        scheduler = self._scheduler
        if scheduler is None or threading.get_ident() != self._owner:
            return None
        return scheduler if scheduler.running else None

    # --- replacements --------------------------------------------------------------------------------

    def either(
        self, controlled: Callable[..., Any], real: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a function that calls `controlled` with the scheduler, or `real` without one."""

        def call(*args: Any, **kwargs: Any) -> Any:
            scheduler = self.scheduler()
            if scheduler is None:
                return real(*args, **kwargs)
            return controlled(scheduler, *args, **kwargs)

        return call


class _Errors(logging.Handler):
    """A logging handler that turns each error into a finding."""

    def __init__(self, patches: Patches) -> None:
        super().__init__(logging.ERROR)
        self._patches = patches

    def emit(self, record: logging.LogRecord) -> None:
        scheduler = self._patches.scheduler()
        if scheduler is not None:
            details = (
                logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
            )
            scheduler.note("logged error", record.getMessage(), details)


@contextmanager
def patched() -> Generator[Patches]:
    """Yield the replacements, which last until the end of the `with` block.

    Garbage is collected only between runs, because a finalizer may be a point. Warnings are not
    logged.
    """
    patches = Patches()
    errors = _Errors(patches)
    disabled, collects = logging.root.manager.disable, gc.isenabled()
    with ExitStack() as stack:
        for module, name, controlled in _REPLACEMENTS:
            real = getattr(module, name)
            stack.enter_context(mock.patch.object(module, name, patches.either(controlled, real)))
        # `concurrent.futures.wait` locks futures in the order of their ids, and iterates over sets.
        stack.enter_context(mock.patch.object(_base, "id", _number_of, create=True))
        stack.enter_context(mock.patch.object(Future, "__hash__", _number_of))
        # Pools of a few pages need no check of the machine's memory limits, which would read files.
        stack.enter_context(mock.patch.object(memory, "_check_available", return_value=None))
        logging.root.addHandler(errors)
        stack.callback(logging.root.removeHandler, errors)
        logging.disable(logging.WARNING)
        stack.callback(logging.disable, disabled)
        gc.disable()
        if collects:
            stack.callback(gc.enable)
        yield patches


def _number_of(future: Future[Any]) -> int:
    """Return the number of the future's condition, which is the same in each run."""
    serial = getattr(getattr(future, "_condition", None), "serial", None)
    return object.__hash__(future) if serial is None else serial


def _lock(scheduler: Scheduler) -> Lock:
    return Lock(scheduler)


def _reentrant_lock(scheduler: Scheduler) -> Lock:
    return Lock(scheduler, reentrant=True)


def _thread(scheduler: Scheduler, **arguments: Any) -> Thread:
    return Thread(scheduler, **arguments)


def _now_s(scheduler: Scheduler) -> float:
    return scheduler.now_s


def _now_ns(scheduler: Scheduler) -> int:
    return int(scheduler.now_s * 1e9)


def _wall_s(scheduler: Scheduler) -> float:
    return _EPOCH_S + scheduler.now_s


def _wall_ns(scheduler: Scheduler) -> int:
    return int(_wall_s(scheduler) * 1e9)


def _sleep(scheduler: Scheduler, seconds: float) -> None:
    scheduler.wait([], seconds, f"sleeps {seconds:g} s")


_REPLACEMENTS: list[tuple[Any, str, Callable[..., Any]]] = [
    (threading, "Lock", _lock),
    (threading, "RLock", _reentrant_lock),
    (threading, "Condition", Condition),
    (threading, "Thread", _thread),
    (threading, "_time", _now_s),
    (queue, "SimpleQueue", SimpleQueue),
    (queue, "time", _now_s),
    (time, "monotonic", _now_s),
    (time, "monotonic_ns", _now_ns),
    (time, "perf_counter", _now_s),
    (time, "time", _wall_s),
    (time, "time_ns", _wall_ns),
    (time, "sleep", _sleep),
]
"""The standard library's names, and their replacements that use a scheduler.

The library's events, semaphores, barriers, queues and futures are built on these names.
"""
