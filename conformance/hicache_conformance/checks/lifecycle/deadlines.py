"""KV-304: the time limit of a call covers the whole call, with all its steps and waits."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.run.outcomes import NotVerified, Unknown, Violation
from hicache_conformance.scenarios.attempts import make_attempt
from hicache_conformance.scenarios.fault_path import (
    TIMEOUT_S,
    FaultPath,
    must_end_in_time,
    open_direct_path,
    open_fault_path,
)
from hicache_conformance.scenarios.fork_server import ForkServer, write_half, write_in_a_loop
from hicache_conformance.scenarios.lifecycle_actors import receive_result
from hicache_conformance.scenarios.setup import fitting
from hicache_conformance.tools.network.proxy import FaultProxy
from hicache_conformance.tools.processes.child import Child
from hicache_conformance.tools.processes.machine import MachineDelay
from hicache_conformance.tools.processes.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from hicache_conformance.case.case import Case
    from hicache_conformance.scenarios.attempts import Attempt, Caller
    from hicache_conformance.tools.processes.child import Link
    from hicache_storage.keys import KeySpace

_SIGNALLED_EVERY_S = 0.2
_LONGER = 3.0
_BREAK_SHARE = 0.85
_STEP_SHARE = 0.3
"""Each direction takes this share of `timeout_s`, so a round trip is well in time."""
_TRIES = 2
"""So that a machine that is busy for a moment does not end the call at its first steps."""
_BATCH = 48
"""How many pages a call has. A call with one step for each takes many times `timeout_s`."""
_LARGE_NBYTES = 1 << 20
"""A page this large takes long enough to write that a stop can hit it."""
_STOPS = 24
_STOPS_QUICK = 6
_LONGEST_RUN_S = 0.03


# --- steps and signals ---------------------------------------------------------------------------


@check("KV-304")
def steps_that_are_each_in_time_do_not_add_up(case: Case) -> None:
    """A call of many steps ends in time, even if each step takes most of the time for the whole call."""
    with open_fault_path(case, 4 << 10) as path:
        caller = path.caller()
        count = min(_BATCH, caller.probe.most_pages(path.space))
        pages = case.contents(path.space, case.hashes(count))
        absent = case.hashes(count)
        path.answer_of(partial(caller.exists, absent))
        path.on_all(partial(FaultProxy.delay, seconds=_STEP_SHARE * path.timeout_s))
        for call in (
            partial(caller.exists, absent),
            partial(caller.get, absent),
            partial(caller.set, pages),
            partial(caller.delete, absent),
        ):
            for _ in range(_TRIES):
                if _must_end(path, call, "each round trip takes most of timeout_s").error is None:
                    break


@check("KV-304")
def connections_that_break_late_do_not_prolong_a_call(case: Case) -> None:
    """A call ends in time, even if each of its connections breaks shortly before the time limit."""
    with open_fault_path(case, 4 << 10) as short:
        if short.timeout_s > TIMEOUT_S:
            raise NotVerified("the store takes no `timeout_s` of the kit's choice")
        long_s = _LONGER * short.timeout_s  # so that a second try exceeds the tolerance, too
        path = replace(short, config={**short.config, "timeout_s": long_s}, timeout_s=long_s)
        caller = path.caller()
        pages = path.stored_pages(caller, 1)
        path.on_all(FaultProxy.go_silent)
        with Threads() as threads:
            getting = threads.start(lambda: caller.get(list(pages)))
            while not getting.wait(_BREAK_SHARE * long_s):
                path.on_all(FaultProxy.refuse)
                path.on_all(FaultProxy.go_silent)
            attempt = getting.result()
        path.on_all(FaultProxy.pass_through)
        must_end_in_time(path, attempt, "each connection breaks late")


@check("KV-304")
def a_signal_does_not_prolong_a_call(case: Case) -> None:
    """A call to a silent server ends in time, even if its thread gets a signal every 0.2 s."""
    with open_fault_path(case, 4 << 10) as path:
        pages = path.stored_pages(path.caller(), 1)
        claims = case.subject.storage_class, path.config
        arguments = (path.space, list(pages), path.limit_s)
        with Child(*claims, _call_under_signals, *arguments, absent=case.absent) as child:
            receive_result(child)
            path.on_all(FaultProxy.go_silent)
            child.send("the server is silent")
            try:
                outcomes: list[tuple[str, float, str]] = child.receive(6 * path.limit_s)
            except Unknown:
                outcomes = [("batch_get", 6 * path.limit_s, "nothing: the call hangs")]
    for operation, elapsed_s, result in outcomes:
        if elapsed_s > path.limit_s:
            raise Violation(
                f"{operation} took too long with a silent server, while signals arrived",
                f"an end within timeout_s + 1 = {path.timeout_s + 1:g} s: after a signal, a call"
                " waits only for the rest of its time",
                f"{result} after {elapsed_s:.1f} s",
                (f"a signal every {_SIGNALLED_EVERY_S} s", f"{operation} -> {result}"),
            )


def _call_under_signals(link: Link, space: KeySpace, hashes: list[str], limit_s: float) -> None:
    """Actor: make calls in the main thread, where signals arrive. Send their durations and results."""
    probe = link.open()
    probe.open_space(space)
    probe.get(space, hashes)
    memory = probe.memory(space, len(hashes))
    calls: dict[str, Callable[[], Any]] = {
        "batch_get": lambda: probe.storage.batch_get(space, hashes, memory.pages),
        "batch_exists": lambda: probe.storage.batch_exists(space, hashes),
    }
    link.send("ready")
    link.receive()
    signal.signal(signal.SIGALRM, _ignore)
    signal.setitimer(signal.ITIMER_REAL, _SIGNALLED_EVERY_S, _SIGNALLED_EVERY_S)
    outcomes: list[tuple[str, float, str]] = []
    for operation, call in calls.items():
        began_s, delay = time.monotonic(), MachineDelay()
        try:
            result = repr(call())
        except Exception as error:  # noqa: BLE001 - other checks judge it
            result = f"raised {type(error).__name__}"
        own_s = time.monotonic() - began_s - delay.so_far_s()
        outcomes.append((operation, own_s, result))
        if outcomes[-1][1] > limit_s:
            break
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    link.send(outcomes)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing, because the signal only has to interrupt."""


# --- calls that wait for other processes ---------------------------------------------------------


@check("KV-304", Need.SHARED)
def a_process_that_stops_in_a_set_holds_nobody_up(case: Case) -> None:
    """Every call ends in time while another process is stopped half way through a page."""
    path = open_direct_path(case, dict(case.config))
    caller, calls = _calls(path, _large(case, path.space))
    fork_server = ForkServer(case)
    for before in (7,) if case.quick else (7, 4, 0):
        pages = case.contents(caller.space, case.hashes(1))
        writer = fork_server.spawn(write_half, caller.space, {}, pages, before)
        writer.receive()
        # The writer is held, or has ended if the store takes a page as a whole.
        writer.receive()
        for call in calls:
            _must_end(path, call, "another process has stopped in the middle of a set")
        writer.kill()
        case.trace.stored[caller.space].update(pages)
    path.answer_of(calls[0])


@check("KV-304", Need.SHARED, stochastic=True, quick=False)
def a_process_that_is_stopped_holds_nobody_up(case: Case) -> None:
    """Every call ends in time while another process is stopped (SIGSTOP) somewhere in its sets."""
    path = open_direct_path(case, dict(case.config))
    caller, calls = _calls(path, _large(case, path.space))
    pages = case.contents(caller.space, case.hashes(1))
    case.trace.stored[caller.space].update(pages)
    writer = ForkServer(case).spawn(write_in_a_loop, caller.space, pages)
    writer.receive()
    stops = _STOPS_QUICK if case.quick else _STOPS
    for turn in range(stops):
        time.sleep(case.random.uniform(0, _LONGEST_RUN_S))
        with writer.stopped():
            for call in calls[turn % 2 :: 2]:
                _must_end(path, call, "another process was stopped in one of its sets")
    writer.kill()
    case.evidence["stopped"] = f"{stops} times"
    path.answer_of(calls[0])


@check("KV-304", Need.STALL)
def a_call_that_has_to_wait_ends_in_time(case: Case) -> None:
    """If a call must wait for something that another process holds, it ends in time, and works later."""
    path = open_direct_path(case, dict(case.config))
    _, calls = _calls(path, path.space)
    with case.subject.stall():
        for call in calls:
            _must_end(path, call, "another process holds a lock that the call needs")
    for call in calls:
        path.answer_of(call)


@check("KV-304", Need.STALL)
def a_delete_that_waited_in_vain_is_not_true(case: Case) -> None:
    """If a delete must wait for another process until its time is over, True means that it was done."""
    path = open_direct_path(case, dict(case.config))
    caller = path.caller()
    pages = list(path.stored_pages(caller, 1))
    with case.subject.stall():
        attempt = caller.delete(pages)
    if attempt.answer == [True] and path.answer_of(partial(caller.exists, pages)) == [True]:
        raise caller.probe.violation(
            "batch_delete returned True, and its page is still there",
            expected="StorageTimeout, or False: another process held a lock that the call needs",
            got="True",
        )


def _calls(path: FaultPath, space: KeySpace) -> tuple[Caller, list[Callable[[], Attempt]]]:
    """Return one call of each kind, on a handle that has been in use. Each may be repeated."""
    path.space = space
    caller = path.caller()
    case = path.case
    there = case.contents(space, case.hashes(1))
    fresh = case.contents(space, case.hashes(1))
    path.answer_of(partial(caller.set, there))
    return caller, [
        partial(caller.get, list(there)),
        partial(caller.set, fresh),
        partial(caller.exists, list(there)),
        partial(caller.delete, list(fresh)),
        *_listings(caller, case),
    ]


def _listings(caller: Caller, case: Case) -> list[Callable[[], Attempt]]:
    if not case.claims.enumerable:
        return []
    storage, space = caller.probe.storage, caller.space

    def listed() -> list[object]:
        return list(storage.scan(space))

    return [partial(make_attempt, caller.probe, "scan", listed, limit_s=caller.limit_s)]


def _must_end(path: FaultPath, call: Callable[[], Attempt], why: str) -> Attempt:
    """Make a call that must end in time. A late call has a second try: the machine may be busy."""
    attempt = call()
    if attempt.own_s > path.limit_s:
        attempt = min(attempt, call(), key=lambda one: one.own_s)
    must_end_in_time(path, attempt, why, hint=", with StorageTimeout if need be")
    return attempt


def _large(case: Case, space: KeySpace) -> KeySpace:
    return case.space(fitting(case, _LARGE_NBYTES), tenant=space.tenant)
