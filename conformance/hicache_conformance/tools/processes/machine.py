"""How long the machine ran something else, and whether a thread of this process still has work."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

_TASKS = "/proc/self/task"
_STAT = Path("/proc/stat")
_STEAL_FIELD = 8
"""Where a line `cpu0 ...` of /proc/stat has the time that a hypervisor took."""

_MOST_DELAY_S = 60.0


class MachineDelay:
    """How long a thread of this process has waited for a processor since this object was made.

    The kernel counts this time. It is zero if a processor is free, however slow the store is, and
    if the kernel does not count it.
    """

    def __init__(self) -> None:
        self._waited = _waited_s()
        self._stolen = _stolen_s()

    def so_far_s(self) -> float:
        """Return the wait of the thread that waited longest, plus the time that a hypervisor took."""
        waited = (s - self._waited.get(task, 0.0) for task, s in _waited_s().items())
        stolen = (s - self._stolen.get(cpu, 0.0) for cpu, s in _stolen_s().items())
        return max(waited, default=0.0) + max(stolen, default=0.0)


class WorkLimit:
    """A time limit for work that a check repeats, as long as a machine that is not busy would work.

    The time in which the machine ran something else does not count, up to `_MOST_DELAY_S`.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._delay = MachineDelay()
        self._began_s = time.monotonic()
        self._until_s = self._began_s + limit_s

    def is_over(self) -> bool:
        """Return whether the work has had its time."""
        return not self.allows(0.0)

    def allows(self, seconds: float) -> bool:
        """Return whether work of so many seconds ends in time."""
        if time.monotonic() + seconds < self._until_s:
            return True
        self._until_s = self._began_s + self._limit_s + min(self._delay.so_far_s(), _MOST_DELAY_S)
        return time.monotonic() + seconds < self._until_s


def is_at_rest() -> bool:
    """Return True if no other thread of this process runs, or waits for a processor.

    A thread that was just woken counts, however late the machine lets it run. Without `/proc`, True.
    """
    told = _told_of_threads("stat")
    told.pop(str(threading.get_native_id()), None)
    return not any(text.rpartition(")")[2].split()[0] in ("R", "D") for text in told.values())


def _waited_s() -> dict[str, float]:
    """Return for how many seconds each thread was ready to run but did not run."""
    found: dict[str, float] = {}
    for task, text in _told_of_threads("schedstat").items():
        with suppress(IndexError, ValueError):
            found[task] = int(text.split()[1]) / 1e9
    return found


def _told_of_threads(name: str) -> dict[str, str]:
    """Return the contents of a file of `/proc` for each thread of this process."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for task in os.listdir(_TASKS):  # noqa: PTH208 - names, and no path for each
            with suppress(OSError):  # the thread has ended
                found[task] = _read(f"{_TASKS}/{task}/{name}")
    return found


def _read(path: str) -> str:
    """Read a small file in a fifth of the time of `Path.read_text`: checks do it for every thread."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 4096).decode()
    finally:
        os.close(descriptor)


def _stolen_s() -> dict[str, float]:
    """Return the time that a hypervisor took from each processor, in seconds."""
    found: dict[str, float] = {}
    with suppress(OSError, IndexError, ValueError):
        for line in _STAT.read_text().splitlines():
            fields = line.split()
            if fields and fields[0].startswith("cpu") and fields[0] != "cpu":
                found[fields[0]] = int(fields[_STEAL_FIELD]) / os.sysconf("SC_CLK_TCK")
    return found
