"""Other processes: children that tests fork, and whether they are alive."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

_LIMIT_S = 30.0


def descriptors() -> int:
    """Return how many descriptors this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def is_alive(pid: int) -> bool:
    """Return True if a process runs. A process that has ended but was not reaped does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def in_a_fork(call: Callable[[], object]) -> object:
    """Return the result of `call` in a forked child."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def run(connection: Connection) -> None:
        connection.send(call())

    child = context.Process(target=run, args=(theirs,))
    child.start()
    try:
        assert ours.poll(_LIMIT_S), "the child does not answer"
        return ours.recv()
    finally:
        child.kill()
        child.join(_LIMIT_S)
        ours.close()
        theirs.close()


def exit_code(child: int, timeout_s: float = 60.0) -> int:
    """Return the exit code of a forked child. If the child hangs, kill it: its code is -SIGKILL."""
    end_s = time.monotonic() + timeout_s
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end_s:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
