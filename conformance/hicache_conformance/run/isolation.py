"""Runs checks in processes of their own, so that a store that crashes the interpreter costs one check.

If a check kills its process, or hangs in it, the check fails. The next check runs in a new process.
"""

from __future__ import annotations

import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_conformance.checks import Check, all_checks
from hicache_conformance.report.record import CheckRecord
from hicache_conformance.run.description import StoreDescription, describe_subject
from hicache_conformance.run.operator import deployed_store
from hicache_conformance.run.outcomes import Outcome, Unknown
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.tools.observation.files import remove_tree
from hicache_conformance.tools.processes.child import Child, Link

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

T = TypeVar("T")
R = TypeVar("R")
_GRACE_S = 30.0


def run_isolated(
    name: str,
    config: Mapping[str, Any],
    checks: Sequence[Check],
    options: RunOptions,
    *,
    processes: int = 1,
) -> Iterator[CheckRecord]:
    """Yield the record of each check on the deployed store `name`, in order, as soon as it is done.

    Use several processes only if every test has a store of its own. In a shared store, the pages of
    one test would take up room that another test needs.
    """
    limit_s = options.check_limit_s + _GRACE_S

    def work(process: CheckProcess, check: Check) -> CheckRecord:
        record = _record_from(process, check, limit_s)
        if record.outcome in (Outcome.FAILED, Outcome.UNKNOWN):
            process.renew()  # it may have died, or a thread may hang in it
        return record

    return map_in_processes(
        partial(CheckProcess, _run_checks, name, dict(config), options), work, checks, processes
    )


class CheckProcess:
    """A process that runs an actor, and is replaced when `renew` is called. One thread may use it."""

    def __init__(self, actor: Callable[..., None], *arguments: Any) -> None:
        self._actor, self._arguments = actor, arguments
        self._stack = ExitStack()
        self._worker: Child | None = None

    def request(self, message: Any, limit_s: float) -> Any:
        """Send a message to the actor and return its reply.

        Raises:
            EOFError: The process died. The message has its exit code or its signal.
            Unknown: No reply came in time.
        """
        if self._worker is None:
            self._worker = self._stack.enter_context(worker(self._actor, *self._arguments))
        self._worker.send(message)
        try:
            return self._worker.receive(limit_s)
        except EOFError:
            raise EOFError(_exit_text(self._worker.wait())) from None

    def renew(self) -> None:
        """End the process. The next request starts a new one."""
        self._stack.close()
        self._worker = None

    close = renew


def map_in_processes(
    make_process: Callable[[], CheckProcess],
    work: Callable[[CheckProcess, T], R],
    items: Sequence[T],
    processes: int,
) -> Iterator[R]:
    """Yield the result of `work` for each item, in order, as soon as it is done."""
    of_thread = threading.local()
    with ExitStack() as stack:
        pool = ThreadPoolExecutor(processes, "check-process")

        def run(item: T) -> R:
            if not hasattr(of_thread, "process"):
                of_thread.process = stack.enter_context(closing(make_process()))
            return work(of_thread.process, item)

        stack.callback(pool.shutdown, cancel_futures=True)
        yield from pool.map(run, items)


@contextmanager
def worker(actor: Callable[..., None], *arguments: Any) -> Generator[Child, None, None]:
    """Yield a process for checks. Remove the temporary files that it, or a store in it, leaves."""
    directory = tempfile.mkdtemp(prefix="hicache-conformance-")
    try:
        with Child(None, {}, actor, *arguments, temporary=directory, owns_group=True) as child:
            yield child
    finally:
        remove_tree(directory)


def describe_store(name: str, config: Mapping[str, Any]) -> tuple[StoreDescription | None, str]:
    """Return what the store says about itself, or None and the reason why it could not be opened."""
    with worker(_send_description, name, dict(config)) as process:
        try:
            reply: StoreDescription | str = process.receive()
        except EOFError:
            return None, f"opening it, the process {_exit_text(process.wait())}"
        except Unknown as error:
            return None, str(error)
    return (None, reply) if isinstance(reply, str) else (reply, "")


def _send_description(link: Link, name: str, config: dict[str, Any]) -> None:
    """Open a store as a test would, and send what it says about itself (the actor of a process)."""
    _, make_subject = deployed_store(name, config)
    try:
        link.send(describe_subject(make_subject()))
    except Exception as error:  # noqa: BLE001 - the operator reads it
        link.send(f"it can't be opened: {type(error).__name__}: {error}")


def _record_from(process: CheckProcess, check: Check, limit_s: float) -> CheckRecord:
    try:
        record: CheckRecord = process.request(check.name, limit_s)
    except EOFError as error:
        return _process_failure(check, f"the process {error} during this check")
    except Unknown as error:
        return _process_failure(check, f"the process stopped answering during this check: {error}")
    return record


def _process_failure(check: Check, message: str) -> CheckRecord:
    return CheckRecord(
        name=check.name,
        title=check.title,
        outcome=Outcome.FAILED,
        message=message,
        expected="a store that leaves the process that uses it alive",
        stochastic=check.stochastic,
    )


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"


def _run_checks(link: Link, name: str, config: dict[str, Any], options: RunOptions) -> None:
    """Run each check that the parent names, and send its record (the actor of a process)."""
    _, make_subject = deployed_store(name, config)
    by_name = {check.name: check for check in all_checks()}
    while True:
        link.send(run_check(make_subject, by_name[link.receive()], options))
