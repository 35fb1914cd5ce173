"""Checks in a process of their own: a store that crashes the interpreter costs one check.

A check that kills the process, or hangs in it, is a failure for that reason; the next one runs in a new
process.
"""

from __future__ import annotations

import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_conformance.case.case import Case
from hicache_conformance.checks import Check, all_checks
from hicache_conformance.report.record import CheckRecord
from hicache_conformance.run.operator import deployed_store
from hicache_conformance.run.outcomes import Outcome, Unknown
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.tools.observation.files import remove_tree
from hicache_conformance.tools.processes.child import Child, Link

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from hicache_storage.storage import Capabilities

T = TypeVar("T")
R = TypeVar("R")
_GRACE_S = 30.0


def run_isolated(
    name: str,
    config: Mapping[str, Any],
    checks: Sequence[Check],
    options: RunOptions,
    *,
    lanes: int = 1,
) -> Iterator[CheckRecord]:
    """The record of each check on the deployed store `name`, in order, as each is done.

    Several lanes are for stores of which every test has its own: one test's pages must not be another's
    pressure.
    """
    limit_s = options.check_limit_s + _GRACE_S

    def work(lane: CheckProcess, check: Check) -> CheckRecord:
        record = _asked(lane, check, limit_s)
        if record.outcome in (Outcome.FAILED, Outcome.UNKNOWN):
            lane.renew()  # there may be a thread that hangs in the process, or no process at all
        return record

    return in_lanes(
        partial(CheckProcess, _run_checks, name, dict(config), options), work, checks, lanes
    )


class CheckProcess:
    """One process after another, each for as many questions as leave it sound. For one thread."""

    def __init__(self, actor: Callable[..., None], *arguments: Any) -> None:
        self._actor, self._arguments = actor, arguments
        self._stack = ExitStack()
        self._worker: Child | None = None

    def ask(self, question: Any, limit_s: float) -> Any:
        """What the actor answers.

        Raises:
            EOFError: The process died; the message says how.
            Unknown: It said nothing in time.
        """
        if self._worker is None:
            self._worker = self._stack.enter_context(worker(self._actor, *self._arguments))
        self._worker.send(question)
        try:
            return self._worker.receive(limit_s)
        except EOFError:
            raise EOFError(_death(self._worker.wait())) from None

    def renew(self) -> None:
        """Let the next question be answered by a new process."""
        self._stack.close()
        self._worker = None

    close = renew


def in_lanes(
    make_lane: Callable[[], CheckProcess],
    work: Callable[[CheckProcess, T], R],
    items: Sequence[T],
    lanes: int,
) -> Iterator[R]:
    """The result of `work` for each of the items, in order, as each is done."""
    mine = threading.local()
    with ExitStack() as stack:
        pool = ThreadPoolExecutor(lanes, "lane")

        def run(item: T) -> R:
            if not hasattr(mine, "lane"):
                mine.lane = stack.enter_context(closing(make_lane()))
            return work(mine.lane, item)

        stack.callback(pool.shutdown, cancel_futures=True)
        yield from pool.map(run, items)


@contextmanager
def worker(actor: Callable[..., None], *arguments: Any) -> Generator[Child, None, None]:
    """A process for checks. What it, or a store in it, leaves among the temporary files is removed."""
    directory = tempfile.mkdtemp(prefix="hicache-conformance-")
    try:
        with Child(None, {}, actor, *arguments, temporary=directory, owns_group=True) as child:
            yield child
    finally:
        remove_tree(directory)


def asked_claims(name: str, config: Mapping[str, Any]) -> tuple[Capabilities | None, str]:
    """What the store claims, or why none could be opened."""
    with worker(_tell_claims, name, dict(config)) as one:
        try:
            said: Capabilities | str = one.receive()
        except EOFError:
            return None, f"opening it, the process {_death(one.wait())}"
        except Unknown as error:
            return None, str(error)
    return (None, said) if isinstance(said, str) else (said, "")


def _tell_claims(link: Link, name: str, config: dict[str, Any]) -> None:
    """The actor: open a store as a test would, and tell what it claims."""
    _, make_subject = deployed_store(name, config)
    with Case(make_subject()) as case:
        try:
            link.send(case.claims)
        except Exception as error:  # noqa: BLE001 - told to the operator
            link.send(f"it can't be opened: {type(error).__name__}: {error}")


def _asked(lane: CheckProcess, check: Check, limit_s: float) -> CheckRecord:
    try:
        record: CheckRecord = lane.ask(check.name, limit_s)
    except EOFError as error:
        return _casualty(check, f"the process {error} during this check")
    except Unknown as error:
        return _casualty(check, f"the process stopped answering during this check: {error}")
    return record


def _casualty(check: Check, message: str) -> CheckRecord:
    return CheckRecord(
        name=check.name,
        title=check.title,
        outcome=Outcome.FAILED,
        message=message,
        expected="a store that leaves the process that uses it alive",
        stochastic=check.stochastic,
    )


def _death(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"


def _run_checks(link: Link, name: str, config: dict[str, Any], options: RunOptions) -> None:
    """The actor: run the checks that are asked for, and tell each record."""
    _, make_subject = deployed_store(name, config)
    by_name = {check.name: check for check in all_checks()}
    while True:
        link.send(run_check(make_subject, by_name[link.receive()], options))
