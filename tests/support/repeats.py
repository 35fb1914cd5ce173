"""Run a failed test again if the machine did not let it run when it was due.

Most tests have time limits somewhere, and there are thousands of them: on a machine that other
programs use, too, one of them is late in many runs. A test that fails on a machine that was not busy
has failed, and so has one that fails twice. The summary shows what failed once, with its traceback.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hicache_conformance.tools.processes.machine import MachineDelay
from pauses import Pauses

REPEATED = "failed on a busy machine"
"""The property in which the reports of a second try have the traceback of the first."""
_MOST_WAIT_S = 1.0
"""For how long a thread of a test may wait for a processor."""


class Repeats:
    """The plugin, in processes that run tests and in the one that prints the summary."""

    def __init__(self) -> None:
        self._pauses: Pauses | None = None
        self._repeated: set[str] = set()
        self._first_tries: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        self._pauses = self._pauses or Pauses()
        began_s, delay = time.monotonic(), MachineDelay()
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        failures = [report.longreprtext for report in reports if report.failed]
        if failures and item.nodeid not in self._repeated:
            paused_s, waited_s = self._pauses.since_s(began_s), delay.so_far_s()
            if paused_s or waited_s > _MOST_WAIT_S:
                self._repeated.add(item.nodeid)
                why = (
                    f"the machine paused for {paused_s:.1f} s, a thread waited for {waited_s:.1f} s"
                )
                first_try = "\n".join([f"{item.nodeid}: {why}", *failures])
                item.user_properties[:] = [(REPEATED, first_try)]
                _forget_instance(item)
                # All hooks run again, so that the time limit begins again.
                item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)
                return True
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._first_tries += [
                str(text) for key, text in report.user_properties if key == REPEATED
            ]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._first_tries:
            terminalreporter.section(f"{len(self._first_tries)} {REPEATED} and ran again")
        for first_try in self._first_tries:
            terminalreporter.write_line(first_try)

    def pytest_unconfigure(self) -> None:
        if self._pauses is not None:
            self._pauses.close()


def _forget_instance(item: Any) -> None:
    """Let pytest make another instance of the test's class."""
    if getattr(item, "_instance", None) is not None:
        del item._instance
        item._obj = None
