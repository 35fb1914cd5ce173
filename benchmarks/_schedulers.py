"""Engine schedulers that run next to storage: in this process, or in a separate one."""

from __future__ import annotations

import enum
import mmap
import multiprocessing
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

_STEP_ITERATIONS = 20_000
"""One step computes for about half a millisecond."""
_DEVICE_S = 0.0005
"""How long a yielding scheduler waits for its device in each step."""
_REST_S = 0.002
_BEGIN_S = 0.05


class Mode(enum.IntEnum):
    """What a scheduler does."""

    REST = 0
    SPIN = 1
    """The scheduler runs Python without a pause."""
    YIELD = 2
    """After each step the scheduler waits for its device, for about as long as it computed."""
    END = 3


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A scheduler's mode, and the process in which it runs."""

    name: str
    mode: Mode
    same_process: bool


ALONE = Arrangement("no scheduler", Mode.REST, same_process=False)
SPIN_APART = Arrangement("spinning, in another process", Mode.SPIN, same_process=False)
SPIN_BESIDE = Arrangement("spinning, in this process", Mode.SPIN, same_process=True)
YIELD_APART = Arrangement("yielding, in another process", Mode.YIELD, same_process=False)
YIELD_BESIDE = Arrangement("yielding, in this process", Mode.YIELD, same_process=True)
ARRANGEMENTS = (ALONE, SPIN_APART, SPIN_BESIDE, YIELD_APART, YIELD_BESIDE)


class Scheduler:
    """A scheduler, which rests until `begin`. Its loop may run in another process."""

    def __init__(self) -> None:
        self._cells = memoryview(mmap.mmap(-1, 4096)).cast("q")

    @property
    def steps(self) -> int:
        """How many steps the scheduler has done since the start."""
        return self._cells[1]

    def begin(self, mode: Mode) -> None:
        """Change the mode, and give the loop time to notice."""
        self._cells[0] = mode
        time.sleep(_BEGIN_S)

    def run(self) -> None:
        """Run the loop until the mode is END."""
        cells = self._cells
        while (mode := cells[0]) != Mode.END:
            if mode == Mode.REST:
                time.sleep(_REST_S)
                continue
            for _ in range(_STEP_ITERATIONS):
                pass
            if mode == Mode.YIELD:
                time.sleep(_DEVICE_S)
            cells[1] += 1


class Schedulers:
    """A scheduler in this process and one in another. At most one of them works at a time."""

    def __init__(self, beside: Scheduler, apart: Scheduler) -> None:
        self._beside = beside
        self._apart = apart

    def begin(self, arrangement: Arrangement) -> Scheduler:
        """Start the scheduler of an arrangement."""
        scheduler = self._beside if arrangement.same_process else self._apart
        scheduler.begin(arrangement.mode)
        return scheduler


@contextmanager
def schedulers() -> Generator[Schedulers, None, None]:
    """Start both schedulers, at rest. This forks, so call it before the process has threads."""
    beside, apart = Scheduler(), Scheduler()
    process = multiprocessing.get_context("fork").Process(target=apart.run, daemon=True)
    process.start()
    thread = threading.Thread(target=beside.run, daemon=True)
    thread.start()
    try:
        yield Schedulers(beside, apart)
    finally:
        beside.begin(Mode.END)
        apart.begin(Mode.END)
        thread.join()
        process.join()
