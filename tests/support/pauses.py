"""A process that only sleeps, and notes each pause in which the machine did not let it run.

It is a process of its own, so that it also runs while another holds the interpreter lock.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time

_TICK_S = 0.05
_LEAST_S = 0.25
"""On a machine that runs nothing else, `make test` had no pause of more than 0.07 s in ten minutes."""


class Pauses:
    """The pauses of the machine since this object was made."""

    def __init__(self) -> None:
        self._notes = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-S", __file__], stdin=subprocess.PIPE, stdout=self._notes
        )
        while self.process.poll() is None and not self._noted():
            time.sleep(0.01)

    def since_s(self, began_s: float) -> float:
        """Return how long the machine has paused since this reading of `time.monotonic`."""
        time.sleep(2 * _TICK_S)  # the pause may have ended only now
        notes = [line.split() for line in self._noted().splitlines()]
        return sum(float(pause_s) for ended_s, pause_s in notes if float(ended_s) >= began_s)

    def _noted(self) -> bytes:
        return os.pread(self._notes.fileno(), os.fstat(self._notes.fileno()).st_size, 0)

    def close(self) -> None:
        self.process.communicate()
        self._notes.close()


def _note_pauses() -> None:
    _note(0, 0)  # it has begun
    while True:
        began_s = time.monotonic()
        if select.select([sys.stdin], [], [], _TICK_S)[0]:
            return
        ended_s = time.monotonic()
        pause_s = ended_s - began_s - _TICK_S
        if pause_s >= _LEAST_S:
            _note(ended_s, pause_s)


def _note(ended_s: float, pause_s: float) -> None:
    sys.stdout.write(f"{ended_s} {pause_s}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _note_pauses()
