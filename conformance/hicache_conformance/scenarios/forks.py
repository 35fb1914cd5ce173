"""A process forks while a store is open in it, and both sides use the handle.

The kit starts a process for this. If the test's process forked, the child would have dead threads
of pytest and of other stores.
"""

from __future__ import annotations

import enum
import hashlib
import os
import signal
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING

from hicache_conformance.run.outcomes import NotVerified, Violation
from hicache_conformance.scenarios.attempts import Caller
from hicache_conformance.tools.content.content import content, diagnose
from hicache_conformance.tools.processes.descriptors import wait_readable
from hicache_storage.errors import HiCacheError
from hicache_storage.storage import Retention

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hicache_conformance.scenarios.attempts import Attempt
    from hicache_conformance.tools.processes.child import Link
    from hicache_storage.keys import KeySpace

CALL_LIMIT_S = 15.0
_ANSWER_LIMIT_S = 60.0
_ROUNDS = 12
_ROUNDS_LIMIT_S = 8.0
"""After this time a slow store has fewer rounds: many calls that are in time are not a hang."""
_ROUND_PAGES = 3


class ClosesFirst(enum.Enum):
    """Which side closes first, while the other one continues."""

    CHILD = "the forked child"
    PARENT = "its parent"
    """The child is killed in the end, so it never closes its handle."""


@dataclass(slots=True)
class Report:
    """What one side of the fork reports."""

    problem: str = ""
    """What went wrong, or ""."""
    refusals: int = 0
    calls: int = 0
    taken: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """The pages whose set returned True."""


def fork_and_use(
    link: Link, space: KeySpace, kept: Mapping[str, bytes], first: ClosesFirst, limit_s: float
) -> None:
    """Actor: set `kept`, fork, and use the handle on both sides at once, then on one side at a time.

    The actor sends the reports of the forked child and of its parent.
    """
    # The only other thread of this process sleeps, so the warning about threads does not apply.
    warnings.simplefilter("ignore", DeprecationWarning)
    probe = link.open()
    probe.open_space(space)
    parent = _HandleUser(Caller(probe, space, CALL_LIMIT_S), kept, "parent")
    parent.set_all(kept)
    parent.use(0.0)  # The first calls start what the store starts lazily, such as threads.
    child = _ForkedUser(parent)
    try:
        child.send(limit_s)
        parent.use(limit_s)
        child.receive()
        if first is ClosesFirst.PARENT:
            parent.close()
        child.send(0.0)
        report = child.receive()
        if first is ClosesFirst.CHILD and not report.problem:
            child.end()
            parent.use(0.0)
            parent.close()
        link.send((report, parent.report))
    finally:
        child.kill()


class _HandleUser:
    """One side of the fork, with the handle that was opened before the fork."""

    def __init__(self, caller: Caller, kept: Mapping[str, bytes], name: str) -> None:
        self.caller = caller
        self.kept = kept
        self.name = name
        self.report = Report()
        self._numbers = iter(range(1 << 30))
        self._keeps = caller.probe.storage.capabilities.retention is Retention.UNTIL_DELETED

    def set_all(self, pages: Mapping[str, bytes]) -> None:
        """Set pages that must be there from now on.

        Raises:
            NotVerified: The store refuses one of them.
        """
        for page_hash, data in pages.items():
            attempt = self.caller.set({page_hash: data})
            if self._keeps and attempt.answer != [True]:
                raise NotVerified(f"the store takes no page before the fork: {attempt.text}")

    def use(self, limit_s: float) -> None:
        """Set, read and look up pages in rounds, for `limit_s` or until the first fault."""
        began_s = time.monotonic()
        elapsed_s, turn = 0.0, 0
        while not self.report.problem and (
            turn == 0 or elapsed_s < limit_s or (turn < _ROUNDS and elapsed_s < _ROUNDS_LIMIT_S)
        ):
            turn += 1
            for problem in self._problems():
                self.report.problem = problem
                break
            elapsed_s = time.monotonic() - began_s

    def close(self) -> None:
        self.report.problem = self.report.problem or self._foreign_error(self.caller.close())

    def _problems(self) -> Iterator[str]:
        """Yield what goes wrong in one round."""
        fresh = self._fresh()
        for page_hash, data in fresh.items():
            attempt = self.caller.set({page_hash: data})
            yield from filter(None, [self._foreign_error(attempt)])
            if attempt.answer == [True]:
                self.report.taken[page_hash] = data
        for page_hash, data in [*self.kept.items(), *fresh.items()]:
            was_set = page_hash in self.kept or page_hash in self.report.taken
            read, seen = self.caller.get([page_hash]), self.caller.exists([page_hash])
            yield from filter(None, [self._foreign_error(read), self._foreign_error(seen)])
            if read.error is None and read.answer not in ([data], [None]):
                yield f"batch_get is True with wrong bytes: {self._diagnosed(page_hash, read, data)}"
            lost = read.answer == [None] or seen.answer == [False]
            if lost and was_set and self._keeps:
                yield f"a page that was set is a miss: {page_hash[:8]}"
        if len(self.report.taken) > 8 * _ROUND_PAGES:
            for page_hash in list(self.report.taken)[:_ROUND_PAGES]:
                attempt = self.caller.delete([page_hash])
                yield from filter(None, [self._foreign_error(attempt)])
                del self.report.taken[page_hash]

    def _foreign_error(self, attempt: Attempt) -> str:
        """Return the exception of a call if it is not a refusal, or ""."""
        self.report.calls += 1
        if attempt.error is None:
            return ""
        self.report.refusals += 1
        return (
            "" if isinstance(attempt.error, HiCacheError) else f"{attempt.operation} {attempt.text}"
        )

    def _fresh(self) -> dict[str, bytes]:
        space = self.caller.space
        numbers = [next(self._numbers) for _ in range(_ROUND_PAGES)]
        names = [f"{os.getpid()}/{number}".encode() for number in numbers]
        hashes = [hashlib.sha256(name).hexdigest() for name in names]
        return {one: content(space.id, one, space.stored_nbytes) for one in hashes}

    def _diagnosed(self, page_hash: str, read: Attempt, data: bytes) -> str:
        got: bytes = read.answer[0] or b""
        return diagnose(got, space_id=self.caller.space.id, page_hash=page_hash, allowed=[data])


class _ForkedUser:
    """The parent's side of a forked child that uses the inherited handle on request."""

    def __init__(self, parent: _HandleUser) -> None:
        self._connection, child_end = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._connection.close()
            with suppress(BaseException):
                _run_child(child_end, _HandleUser(parent.caller, parent.kept, "forked child"))
            os._exit(0)
        child_end.close()

    def send(self, limit_s: float) -> None:
        """Ask the child to use the handle for `limit_s`."""
        with suppress(BrokenPipeError):
            self._connection.send(limit_s)

    def receive(self) -> Report:
        try:
            if self._connection.poll(_ANSWER_LIMIT_S):
                report: Report = self._connection.recv()
                return report
        except (EOFError, ConnectionResetError):
            return Report(
                problem=f"the process died: {_exit_text(os.waitpid(self._pid, os.WNOHANG)[1])}"
            )
        return Report(problem=f"it was not done after {_ANSWER_LIMIT_S:.0f} s")

    def end(self) -> None:
        """Close the handle in the child and wait until the child has ended."""
        self._connection.close()
        descriptor = os.pidfd_open(self._pid)
        try:
            wait_readable(descriptor, CALL_LIMIT_S)
        finally:
            os.close(descriptor)

    def kill(self) -> None:
        """Send SIGKILL, but no message first, because on a message the child would close its handle."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._connection.close()


def _run_child(connection: Connection, side: _HandleUser) -> None:
    with suppress(EOFError):
        while True:
            limit_s: float = connection.recv()
            try:
                side.use(limit_s)
            except Violation as violation:  # A call hangs.
                side.report.problem = f"{violation.message} ({violation.got})"
            connection.send(side.report)
    side.close()


def _exit_text(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"exit code {code}"
