"""Forked children that tests wait for."""

from __future__ import annotations

import os
import signal
import time


def exit_code(child: int, timeout_s: float = 60.0) -> int:
    """The exit code of a forked child. One that hangs is killed, and has -SIGKILL."""
    end_s = time.monotonic() + timeout_s
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end_s:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
