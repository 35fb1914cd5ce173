"""KV-304: the limit of a call is that of the whole call, whatever its steps wait for, and whoever."""

from __future__ import annotations

import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.run.outcomes import Unknown, Violation
from hicache_conformance.scenarios.attempts import attempted
from hicache_conformance.scenarios.fault_path import FaultPath, direct_road, foreign, road
from hicache_conformance.scenarios.fork_server import ForkServer, write_half, write_in_a_loop
from hicache_conformance.scenarios.planting import fitting
from hicache_conformance.scenarios.usage import heard
from hicache_conformance.tools.network.proxy import FaultProxy
from hicache_conformance.tools.processes.child import Child

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from hicache_conformance.case.case import Case
    from hicache_conformance.scenarios.attempts import Attempt, Caller
    from hicache_conformance.tools.processes.child import Link
    from hicache_storage.keys import KeySpace

_SIGNALLED_EVERY_S = 0.2
_STEP_SHARE = 0.3
"""Of `timeout_s`, that the way takes in each direction: a round trip is well within it."""
_BATCH = 48
"""Pages of a call: one that takes a step for each takes many times `timeout_s`."""
_LARGE_NBYTES = 1 << 20
"""Long enough to write for a writer to be stopped while it does."""
_STOPS = 24
_STOPS_QUICK = 6
_LONGEST_RUN_S = 0.03


# --- steps and signals ---------------------------------------------------------------------------


@check("KV-304")
def steps_that_are_each_in_time_do_not_add_up(case: Case) -> None:
    """A call of many steps ends in time where each step takes most of what the whole call may."""
    with road(case, 4 << 10) as way:
        caller = way.caller()
        count = min(_BATCH, caller.probe.max_batch)
        pages = case.contents(way.space, case.hashes(count))
        absent = case.hashes(count)
        way.in_time(partial(caller.exists, absent))
        way.all(partial(FaultProxy.delay, seconds=_STEP_SHARE * way.timeout_s))
        for call in (
            partial(caller.exists, absent),
            partial(caller.get, absent),
            partial(caller.set, pages),
            partial(caller.delete, absent),
        ):
            _must_end(way, call, "each round trip takes most of timeout_s")


@check("KV-304")
def a_signal_does_not_prolong_a_call(case: Case) -> None:
    """A call ends in time though its thread is sent a signal every 0.2 s, with a silent server."""
    with road(case, 4 << 10) as way:
        pages = way.planted(way.caller(), 1)
        claims = case.subject.storage_class, way.config
        arguments = (way.space, list(pages), way.limit_s)
        with Child(*claims, _call_under_signals, *arguments, absent=case.absent) as child:
            heard(child)
            way.all(FaultProxy.go_silent)
            child.say("the server is silent")
            try:
                told: list[tuple[str, float, str]] = child.hear(6 * way.limit_s)
            except Unknown:
                told = [("batch_get", 6 * way.limit_s, "nothing: the call hangs")]
    for operation, elapsed_s, came in told:
        if elapsed_s > way.limit_s:
            raise Violation(
                f"{operation} took too long with a silent server, when signals arrive meanwhile",
                f"an end within timeout_s + 1 = {way.timeout_s + 1:g} s: a wait that a signal has"
                " interrupted goes on for what is left of it",
                f"{came} after {elapsed_s:.1f} s",
                (f"a signal every {_SIGNALLED_EVERY_S} s", f"{operation} -> {came}"),
            )


def _call_under_signals(link: Link, space: KeySpace, hashes: list[str], limit_s: float) -> None:
    """Actor: calls in the main thread, where signals arrive; how long each took, and what came."""
    probe = link.open()
    probe.open_space(space)
    probe.get(space, hashes)
    memory = probe.memory(space, len(hashes))
    calls: dict[str, Callable[[], Any]] = {
        "batch_get": lambda: probe.storage.batch_get(space, hashes, memory.pages),
        "batch_exists": lambda: probe.storage.batch_exists(space, hashes),
    }
    link.say("ready")
    link.hear()
    signal.signal(signal.SIGALRM, _ignore)
    signal.setitimer(signal.ITIMER_REAL, _SIGNALLED_EVERY_S, _SIGNALLED_EVERY_S)
    told: list[tuple[str, float, str]] = []
    for operation, call in calls.items():
        began_s = time.monotonic()
        try:
            came = repr(call())
        except Exception as error:  # noqa: BLE001 - other checks judge what it is
            came = f"raised {type(error).__name__}"
        told.append((operation, time.monotonic() - began_s, came))
        if told[-1][1] > limit_s:
            break
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    link.say(told)


def _ignore(number: int, frame: FrameType | None) -> None:
    """A signal handler: the signal is to interrupt, and nothing else."""


# --- others that hold what a call waits for ------------------------------------------------------


@check("KV-304", Need.SHARED)
def a_process_that_stops_in_a_set_holds_nobody_up(case: Case) -> None:
    """Every call ends in time while another process has stopped half way through a page."""
    way = direct_road(case, dict(case.config))
    caller, calls = _calls(way, _large(case, way.space))
    mortals = ForkServer(case)
    for before in (7,) if case.quick else (7, 4, 0):
        pages = case.contents(caller.space, case.hashes(1))
        writer = mortals.start(write_half, caller.space, {}, pages, before)
        writer.hear()
        writer.hear()  # that it is held, or that it is done: the store took the page as a whole
        for call in calls:
            _must_end(way, call, "another process has stopped in the middle of a set")
        writer.kill()
        case.trace.stored[caller.space].update(pages)
    way.in_time(calls[0])


@check("KV-304", Need.SHARED, stochastic=True, quick=False)
def a_process_that_is_stopped_holds_nobody_up(case: Case) -> None:
    """Every call ends in time while another process is stopped (SIGSTOP) somewhere in its sets."""
    way = direct_road(case, dict(case.config))
    caller, calls = _calls(way, _large(case, way.space))
    pages = case.contents(caller.space, case.hashes(1))
    case.trace.stored[caller.space].update(pages)
    writer = ForkServer(case).start(write_in_a_loop, caller.space, pages)
    writer.hear()
    stops = _STOPS_QUICK if case.quick else _STOPS
    for turn in range(stops):
        time.sleep(case.random.uniform(0, _LONGEST_RUN_S))
        with writer.stopped():
            for call in calls[turn % 2 :: 2]:
                _must_end(way, call, "another process was stopped in one of its sets")
    writer.kill()
    case.evidence["stopped"] = f"{stops} times"
    way.in_time(calls[0])


@check("KV-304", Need.STALL)
def a_call_that_has_to_wait_ends_in_time(case: Case) -> None:
    """Every call ends in time while somebody holds what it has to wait for, and works afterwards."""
    way = direct_road(case, dict(case.config))
    _, calls = _calls(way, way.space)
    with case.subject.stall():
        for call in calls:
            _must_end(way, call, "somebody holds what it has to wait for")
    for call in calls:
        way.in_time(call)


def _calls(way: FaultPath, space: KeySpace) -> tuple[Caller, list[Callable[[], Attempt]]]:
    """One of each kind, of a handle that has been in use. They may be made again and again."""
    way.space = space
    caller = way.caller()
    case = way.case
    there = case.contents(space, case.hashes(1))
    fresh = case.contents(space, case.hashes(1))
    way.in_time(partial(caller.set, there))
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

    return [partial(attempted, caller.probe, "scan", listed, limit_s=caller.limit_s)]


def _must_end(way: FaultPath, call: Callable[[], Attempt], why: str) -> None:
    """It ends in time, and raises nothing foreign. Who is late has a second try: it is fair."""
    made = call()
    if made.elapsed_s > way.limit_s:
        made = min(made, call(), key=lambda one: one.elapsed_s)
    if made.error is not None and not made.failed_by_contract:
        raise foreign(made, way.case.trace.sequence(made.operation))
    if made.elapsed_s > way.limit_s:
        raise Violation(
            f"{made.operation} took too long when {why}",
            f"an end within timeout_s + 1 = {way.timeout_s + 1:g} s, with StorageTimeout if need be",
            f"{made.text} after {made.elapsed_s:.1f} s",
            way.case.trace.sequence(made.operation),
        )


def _large(case: Case, space: KeySpace) -> KeySpace:
    return case.space(fitting(case, _LARGE_NBYTES), tenant=space.tenant)
