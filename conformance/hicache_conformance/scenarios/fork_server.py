"""Quickly forks the processes that checks kill while they write, and contains their actors.

`ForkServer` starts one interpreter, which forks once for every process. It has already loaded the
storage class, so no process loads the class again. No store is open in this interpreter, and no
thread of the class's module runs there. So a fork is as clean as a fresh interpreter, and quicker.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import sys
import time
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_conformance.run.outcomes import Unknown
from hicache_conformance.tools.processes.child import START_LIMIT_S, run_actor
from hicache_conformance.tools.processes.descriptors import wait_readable
from hicache_conformance.tools.processes.gates import Gate, GatedPage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.tools.processes.child import Link
    from hicache_storage.keys import KeySpace

HELD = "held"
"""What `write_half` sends when the store is half way through a page."""
_REAP = "reap"
_END_LIMIT_S = 10.0
_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class _ForkRequest:
    actor: Callable[..., None]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _ChildExit:
    """A process ended with this code (negative for a signal). It is not reaped yet."""

    code: int


class ForkServer:
    """Processes that open a case's store, one at a time."""

    def __init__(self, case: Case) -> None:
        self._server = case.child(_serve_forks_of_class)
        if not self._server.receive():
            self._server.kill()
            self._server = case.child(_serve_forks)
        self._latest: ForkedChild | None = None
        case.at_end(self.end)

    def spawn(self, actor: Callable[..., None], *arguments: Any) -> ForkedChild:
        """Kill the process of the last call. Fork a new one that runs `actor(link, *arguments)`."""
        if self._latest is not None:
            self._latest.kill()
        self._server.send(_ForkRequest(actor, arguments))
        self._latest = ForkedChild(self._server.send, self._server.receive)
        return self._latest

    def end(self) -> None:
        """Kill the last process, which might outlive the server and write where the case has
        cleaned up.
        """
        if self._latest is not None:
            self._latest.end()


class ForkedChild:
    """The parent's side of one forked process."""

    def __init__(self, send: Callable[[Any], None], receive: Callable[[float], Any]) -> None:
        self._send = send
        self._receive = receive
        self._pid: int = receive(START_LIMIT_S)
        self._code: int | None = None

    def send(self, value: Any) -> None:
        self._send(value)

    def receive(self, limit_s: float = START_LIMIT_S) -> Any:
        """Return the next message of the process.

        Raises:
            EOFError: The process has died.
        """
        message = None if self._code is not None else self._receive(limit_s)
        if isinstance(message, _ChildExit):
            self._code = message.code
            self._send(_REAP)
            self._receive(START_LIMIT_S)
        if self._code is not None:
            raise EOFError
        return message

    def kill(self) -> list[Any]:
        """Send SIGKILL. Return the messages of the process that were not received before."""
        if self._code is None:
            with suppress(ProcessLookupError):
                # The process is not reaped yet, so the number is still its own.
                os.kill(self._pid, signal.SIGKILL)
        return self.remaining_messages()

    def end(self) -> None:
        """Send SIGKILL and wait for the death, without the fork server, which may be dead or hang."""
        if self._code is not None:
            return
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self._pid)
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                wait_readable(descriptor, _END_LIMIT_S)
            finally:
                os.close(descriptor)

    @contextmanager
    def stopped(self) -> Generator[None, None, None]:
        """Send SIGSTOP, and SIGCONT at the end of the block."""
        # The process is not reaped yet, so the number is still its own.
        os.kill(self._pid, signal.SIGSTOP)
        try:
            _await_stop(self._pid)
            yield
        finally:
            os.kill(self._pid, signal.SIGCONT)

    def remaining_messages(self) -> list[Any]:
        """Return all messages that the process sends until it dies."""
        messages: list[Any] = []
        with suppress(EOFError):
            while True:
                messages.append(self.receive())
        return messages


def _await_stop(pid: int) -> None:
    """Wait until a signal has stopped the process."""
    stat = Path(f"/proc/{pid}/stat")
    until_s = time.monotonic() + _END_LIMIT_S
    while stat.read_text().rpartition(")")[2].split()[0] not in "TZ":
        if time.monotonic() > until_s:
            raise Unknown("another process did not stop, though it was sent SIGSTOP")
        time.sleep(_POLL_S)


def _serve_forks_of_class(link: Link) -> None:
    """Load the storage class, report whether its processes can be forked, and fork them.

    They can't be forked if loading the class has started threads, which forked processes would lack.
    """
    threads = _thread_count()
    assert link.reference is not None
    link.reference.load()
    link.send(_thread_count() <= threads)
    _serve_forks(link)


def _serve_forks(link: Link) -> None:
    """Fork a process for each request, and report its exit."""
    # Newer Pythons warn about the other thread, which sleeps.
    warnings.simplefilter("ignore", DeprecationWarning)
    own = os.getpid()
    while True:
        request: _ForkRequest = link.receive()
        pid = os.fork()
        if pid == 0:
            link.send(os.getpid())
            run_actor(link, own, request.actor, *request.arguments)
            os._exit(0)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        link.send(_ChildExit(_exit_code(pid)))
        while link.receive() != _REAP:
            pass  # The message was for the process that has ended.
        os.waitpid(pid, 0)
        link.send(_REAP)


def _thread_count() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - a Path costs more


def _exit_code(pid: int) -> int:
    """Return the exit code of a zombie, without reaping it."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert status is not None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


# --- actors --------------------------------------------------------------------------------------


def write_until_the_limit(
    link: Link, space: KeySpace, pages: Mapping[str, bytes], file_nbytes: int
) -> None:
    """Set pages. The kernel kills this process when a write makes a file longer than a limit."""
    probe = link.open(alone=False)
    probe.open_space(space)
    _limit_files(file_nbytes)
    link.send(probe.set(space, pages))


def open_within_the_limit(
    link: Link,
    config: dict[str, Any],
    space: KeySpace,
    pages: Mapping[str, bytes],
    file_nbytes: int,
) -> None:
    """Open the store of `config` and set pages. The limit applies before the store is opened."""
    assert link.reference is not None
    link.reference.load()  # The limit must not hit the files of an import.
    sys.dont_write_bytecode = True
    link.config = config
    _limit_files(file_nbytes)
    write_until_the_limit(link, space, pages, file_nbytes)


def write_half(
    link: Link,
    space: KeySpace,
    kept: Mapping[str, bytes],
    pages: Mapping[str, bytes],
    before: int,
) -> None:
    """Set `kept`, then one page of eight segments, and report when the store is half way through it.

    The set continues after the next message of the parent.
    """
    probe = link.open(alone=False)
    probe.open_space(space)
    link.send(probe.set(space, kept) if kept else [])
    memory = probe.memory(space, 1, 8).filled_with(list(pages.values()))
    gated = GatedPage(memory.pages[0], _LinkGate(link), before=before)
    link.send(probe.batch_set(space, list(pages), [gated]))


def read_half(link: Link, space: KeySpace, hashes: Sequence[str]) -> None:
    """Get pages of eight segments, and report when the store is half way through the first page."""
    probe = link.open(alone=False)
    probe.open_space(space)
    memory = probe.memory(space, 1, 8)
    gated = GatedPage(memory.pages[0], _LinkGate(link), before=4)
    link.send(probe.batch_get(space, hashes[:1], [gated]))
    link.receive()


def scan_half(link: Link, space: KeySpace) -> None:
    """List pages, and report when the first one arrives."""
    probe = link.open(alone=False)
    probe.open_space(space)
    listing = probe.scanning(space)
    next(listing, None)
    link.send(HELD)
    link.receive()


def write_forever(
    link: Link, space: KeySpace, pages: Mapping[str, Sequence[bytes]], batch_pages: int
) -> None:
    """Set all pages again and again in new versions. Report the accepted pages after each batch."""
    probe = link.open(alone=False)
    probe.open_space(space)
    hashes = list(pages)
    for turn in itertools.count():
        for start in range(0, len(hashes), batch_pages):
            part = hashes[start : start + batch_pages]
            contents = {h: pages[h][turn % len(pages[h])] for h in part}
            verdicts = probe.set(space, contents)
            link.send([h for h, ok in zip(part, verdicts, strict=True) if ok])


def write_in_a_loop(link: Link, space: KeySpace, pages: Mapping[str, bytes]) -> None:
    """Set the same pages again and again and do little else, so that a stop hits a set."""
    probe = link.open(alone=False)
    probe.open_space(space)
    memory = probe.memory(space, len(pages)).filled_with(list(pages.values()))
    link.send(probe.storage.batch_set(space, list(pages), memory.pages))
    while True:
        probe.storage.batch_set(space, list(pages), memory.pages)


class _LinkGate(Gate):
    """A gate that reports to the parent when a call reaches it, and waits for the answer."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def hold(self) -> None:
        self._link.send(HELD)
        self._link.receive()


def _limit_files(nbytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores this signal and gets EFBIG.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, most))
