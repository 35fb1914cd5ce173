"""The file backend's search for pages to evict, over a file system whose listings stall."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from hicache_backends.file.eviction import EvictionSweep, Victim

from hicache_storage.backend_support.deadline import Deadline
from interleavings.scenario import Scenario

_STALL_S = 30.0
_EPSILON_S = 0.001
_NBYTES = 100


class VictimsScenario(Scenario):
    """A writer waits for pages to evict until its deadline, while another thread's search stalls.

    No page is handed out twice.
    """

    name = "victims"
    time_passes = False

    def set_up(self) -> None:
        self.made = 0
        self.taken: set[str] = set()
        nothing = cast("Any", SimpleNamespace())
        self.sweep = EvictionSweep(nothing, nothing, nothing, nothing)
        cast("Any", self.sweep)._look = self._look

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {
            "stalling": partial(self._write, limit_s=_STALL_S),
            "writer": partial(self._write, limit_s=2.0),
            "other": partial(self._write, limit_s=2.0),
            "closer": self._close,
        }

    def finish(self) -> None:
        self.scheduler.settle()
        self.sweep.stop()

    def _write(self, limit_s: float) -> None:
        for _ in range(2):
            victims = self._timed(partial(self.sweep.take, self.pick((1, 2)) * _NBYTES), limit_s)
            paths = {victim.path for victim in victims}
            self.require(len(paths) == len(victims), "a victim is handed out twice")
            self.require(paths.isdisjoint(self.taken), "a victim is handed out twice")
            self.taken |= paths
            if self.pick((False, True)):
                self.taken -= paths
                self.sweep.put_back(victims, 0)

    def _close(self) -> None:
        time.sleep(self.pick((0.0, 1.0)))
        if self.pick((False, True)):
            self.sweep.stop()

    def _timed(self, call: Callable[[Deadline], list[Victim]], limit_s: float) -> list[Victim]:
        began_s = time.monotonic()
        result = call(Deadline(limit_s))
        took_s = time.monotonic() - began_s
        self.require(took_s <= limit_s + _EPSILON_S, f"a call took {took_s} s of {limit_s} s")
        return result

    def _look(self, deadline: Deadline) -> None:
        """Search for some pages to evict. A search may stall until the deadline of its thread."""
        time.sleep(self.pick((0.0, 0.1, deadline.remaining_s())))
        count = self.pick((0, 1, 3))
        if not count:
            self.sweep._pause()
            return
        self.made += count
        found = [
            Victim(number, _NBYTES, f"page-{number}", number)
            for number in range(self.made - count, self.made)
        ]
        self.sweep._add(found, set())
        with self.sweep._changed:
            self.sweep._takeable = len(self.sweep._candidates)
