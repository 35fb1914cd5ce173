"""KV-306: a storage does not change its process, which belongs to an inference server."""

from __future__ import annotations

import importlib
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import Unknown, Violation
from hicache_conformance.scenarios.attempts import error_text
from hicache_conformance.scenarios.lifecycle_actors import receive_result, small_space, use
from hicache_conformance.tools.processes.process_state import (
    changes,
    environment_changes,
    hides_all_warnings,
    process_state,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_conformance.tools.processes.child import Child, Link
    from hicache_storage.keys import KeySpace

_EXIT_LIMIT_S = 10.0
"""How long an interpreter may take to end: a fraction of a second, and more on a busy machine."""


@check("KV-306")
def it_leaves_the_process_as_it_was(case: Case) -> None:
    """Open, use and close change no signal handler, hook, stream or setting of the process."""
    child = case.child(_report_changes, small_space(case))
    found: Sequence[str] = receive_result(child)
    if found:
        raise Violation(
            f"the store changes what belongs to the whole process: {found[0]}",
            expected="the process as it was before the class was imported",
            got="; ".join(found[:5]),
            sequence=["import, open, use, close"],
        )


def _report_changes(link: Link, space: KeySpace) -> None:
    """Actor: send what changed in the process while the storage was open, and after close."""
    before, environment = process_state(), dict(os.environ)
    filters: list[Any] = list(warnings.filters)
    probe = link.open()
    use(probe, space)
    found = changes(before, process_state())
    probe.close()
    found += [line for line in changes(before, process_state()) if line not in found]
    found += environment_changes(environment, link.config)
    if hides_all_warnings(filters):
        found.append("a filter was added that hides all warnings, or earlier ones were removed")
    link.send(found)


@check("KV-306")
def any_thread_may_open_use_and_close_it(case: Case) -> None:
    """Off the main thread, one thread can open a storage, a second use it, and a third close it."""
    child = case.child(_in_three_threads, small_space(case))
    step, error = receive_result(child)
    if error:
        raise Violation(
            f"{step} failed",
            expected="a storage that works in whatever thread calls it",
            got=error,
            sequence=["thread 1: open", "thread 2: use", "thread 3: close"],
        )


def _in_three_threads(link: Link, space: KeySpace) -> None:
    """Actor: make each step in its own thread. All threads live until the end, so no id recurs."""
    opened: list[Probe] = []

    def open_it() -> None:
        opened.append(link.open())

    def use_it() -> None:
        use(opened[0], space)

    def close_it() -> None:
        opened[0].close()

    steps = {
        "opening it off the main thread": open_it,
        "using it in a thread that did not open it": use_it,
        "closing it in a third thread": close_it,
    }
    with ExitStack() as stack:
        for name, step in steps.items():
            thread = stack.enter_context(ThreadPoolExecutor(1))
            error = thread.submit(step).exception()
            if error is not None:
                link.send((name, error_text(error)))
                return
    link.send(("", ""))


@check("KV-306", quick=False)
def it_works_after_spawn_and_lets_the_process_end(case: Case) -> None:
    """A spawned process can use the store while its parent does, and ends by itself after close."""
    space = small_space(case)
    parent = case.open() if case.claims.shared else None
    pages = {}
    if parent is not None:
        parent.open_space(space)
        pages = case.stored(parent, space, 2)
    child = case.child(_use_and_close, space)
    error = receive_result(child)
    if error:
        raise Violation("the store does not work in a spawned process", got=error)
    _must_end(child, "closed the store")
    if parent is not None:
        case.must_hold(parent, space, pages)


def _use_and_close(link: Link, space: KeySpace) -> None:
    """Actor: open, use and close. Send the error, or ""."""

    def run() -> None:
        probe = link.open()
        use(probe, space)
        probe.storage.close()

    try:
        run()
    except Exception as error:  # noqa: BLE001 - it is sent to the parent
        link.send(error_text(error))
    else:
        link.send("")


@check("KV-306", quick=False)
def a_store_that_nobody_closed_lets_the_process_end(case: Case) -> None:
    """A process that used the store and did not close it ends by itself."""
    child = case.child(_use_and_forget, small_space(case))
    receive_result(child)
    _must_end(child, "never closed the store")


def _use_and_forget(link: Link, space: KeySpace) -> None:
    """Actor: keep the storage alive in a module until the interpreter ends."""
    probe = link.open()
    use(probe, space)
    vars(importlib.import_module(__name__))["_never_closed"] = probe
    link.send(True)


def _must_end(child: Child, what: str) -> None:
    try:
        code: int | None = child.wait(_EXIT_LIMIT_S)
    except Unknown:
        code = None
    if code != 0:
        result = f"ends with {code}" if code is not None else "does not end"
        raise Violation(
            f"a process that {what} {result}",
            expected="the return code 0, without help",
            got=f"after {_EXIT_LIMIT_S:.0f} s it was still there" if code is None else str(code),
            sequence=["open, use, end of the program"],
        )
