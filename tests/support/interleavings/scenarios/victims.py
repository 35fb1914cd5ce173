"""The file backend's queue of victims, over a file system whose listings stall."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from hicache_backends.file.victims import VictimQueue
from hicache_backends.file.victims_file import Victim

from hicache_storage.backend_support.deadline import Deadline
from interleavings.scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_STALL_S = 30.0
_EPSILON_S = 0.001
_NBYTES = 100


class VictimsScenario(Scenario):
    """A writer waits for victims until its deadline, and `close` until its own, whatever stalls.

    No victim is handed out twice.
    """

    name = "victims"
    time_passes = False

    def set_up(self) -> None:
        self.made = 0
        self.taken: set[str] = set()
        self.queue = VictimQueue(self._scan, self._take_more, lambda _: [])

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {"writer": self._write, "other": self._write, "closer": self._close}

    def finish(self) -> None:
        self.scheduler.settle()
        self._timed(self.queue.close, 10.0)

    def _write(self) -> None:
        for _ in range(2):
            take = partial(self.queue.take, self.pick((1, 2)) * _NBYTES)
            victims = self._timed(take, 2.0)
            paths = {victim.path for victim in victims}
            self.require(len(paths) == len(victims), "a victim is handed out twice")
            self.require(paths.isdisjoint(self.taken), "a victim is handed out twice")
            self.taken |= paths
            if self.pick((False, True)):
                self.taken -= paths
                self.queue.put_back(victims)

    def _close(self) -> None:
        time.sleep(self.pick((0.0, 1.0)))
        if self.pick((False, True)):
            self._timed(self.queue.close, 1.0)

    def _timed(
        self, call: Callable[[Deadline], list[Victim] | None], limit_s: float
    ) -> list[Victim]:
        began_s = time.monotonic()
        result = call(Deadline(limit_s))
        took_s = time.monotonic() - began_s
        self.require(took_s <= limit_s + _EPSILON_S, f"a call took {took_s} s of {limit_s} s")
        return result or []

    def _scan(self) -> list[Victim]:
        time.sleep(self.pick((0.0, 0.1, _STALL_S)))
        return self._victims(self.pick((0, 1, 3)))

    def _take_more(self, count: int) -> tuple[list[Victim], bool]:
        self.scheduler.point("reads more victims")
        return self._victims(self.pick((0, 0, 1))), self.pick((False, True))

    def _victims(self, count: int) -> list[Victim]:
        self.made += count
        return [
            Victim(number, _NBYTES, f"page-{number}")
            for number in range(self.made - count, self.made)
        ]
