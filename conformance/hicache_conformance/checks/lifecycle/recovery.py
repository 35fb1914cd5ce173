"""KV-305: once the network or the server is back, the same storage works again and mixes up no pages."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.run.outcomes import Violation
from hicache_conformance.scenarios.attempts import call_at_once
from hicache_conformance.scenarios.fault_path import (
    RECOVERY_LIMIT_S,
    FaultPath,
    must_not_be_foreign,
    open_direct_path,
    open_fault_path,
)
from hicache_conformance.scenarios.lifecycle_actors import receive_result
from hicache_conformance.tools.network.proxy import FaultProxy
from hicache_conformance.tools.processes.child import Child
from hicache_conformance.tools.processes.resources import wait_until
from hicache_conformance.tools.processes.threads import Threads
from hicache_storage.errors import HiCacheError, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.scenarios.attempts import Attempt, Caller
    from hicache_conformance.tools.processes.child import Link
    from hicache_storage.keys import KeySpace

_GOOD_ROUNDS = 2
"""After this many good rounds in a row over every connection, all connections are usable."""
_CUT_AT_NBYTES = (0, 5, 100, 4000)
_INTERRUPTED_AFTER_S = 0.2
_SLOW_S = 0.1
"""How late replies come, so that each of many calls needs a connection of its own."""


@check("KV-305")
def it_works_again_after_a_refusal(case: Case) -> None:
    """The same storage works again after the server refused connections."""
    with open_fault_path(case, 4 << 10) as path:
        caller = path.caller()
        _all_at_once(path, caller)
        path.on_all(FaultProxy.refuse)
        _all_at_once(path, caller, twice=True)
        path.on_all(FaultProxy.pass_through)
        must_work_again(path, caller, "the server refused connections")


@check("KV-305")
def it_works_again_after_silence(case: Case) -> None:
    """The same storage works again after calls on every connection have timed out."""
    with open_fault_path(case, 4 << 10) as path:
        caller = path.caller()
        _all_at_once(path, caller)
        path.on_all(FaultProxy.go_silent)
        _all_at_once(path, caller, twice=not case.quick)
        path.on_all(FaultProxy.pass_through)
        must_work_again(path, caller, "its calls timed out")


@check("KV-305")
def gets_that_time_out_use_up_no_connection(case: Case) -> None:
    """The same storage works again after gets timed out on all connections that it had in use."""
    with open_fault_path(case, 4 << 10) as path:
        caller = path.caller()
        gets = [partial(caller.get, list(path.stored_pages(caller, 1)))] * (2 * path.width)
        for fault in (partial(FaultProxy.delay, seconds=_SLOW_S), FaultProxy.go_silent):
            path.on_all(fault)
            for attempt in call_at_once(gets):
                must_not_be_foreign(path, attempt)
        path.on_all(FaultProxy.pass_through)
        must_work_again(path, caller, "gets on all of its connections timed out")


@check("KV-305", quick=False)
def it_works_again_after_silence_whose_replies_are_lost(case: Case) -> None:
    """The same storage works again after calls timed out and their requests and replies were lost."""
    with open_fault_path(case, 4 << 10) as path:
        caller = path.caller()
        _all_at_once(path, caller)
        path.on_all(FaultProxy.go_silent)
        _all_at_once(path, caller)
        path.on_all(FaultProxy.drop_held)
        path.on_all(FaultProxy.pass_through)
        must_work_again(path, caller, "its calls timed out and their replies were lost")


@check("KV-305")
def it_works_again_after_replies_were_cut_short(case: Case) -> None:
    """The same storage works again after connections broke in the middle of replies."""
    with open_fault_path(case, 4 << 10) as path:
        caller = path.caller()
        pages = path.stored_pages(caller, 1)
        for nbytes in _CUT_AT_NBYTES:
            for cut in (
                partial(FaultProxy.truncate_after, nbytes=nbytes),
                partial(FaultProxy.reset_after, nbytes=nbytes, direction="down"),
            ):
                path.on_all(cut)
                must_not_be_foreign(path, caller.get(list(pages)))
                path.on_all(FaultProxy.pass_through)
        must_work_again(path, caller, "its connections broke in the middle of replies")


@check("KV-305")
def a_late_page_is_not_taken_for_a_later_one(case: Case) -> None:
    """If the reply of a get that timed out comes at last, no other get returns its page."""
    with open_fault_path(case, 4 << 10) as path:
        caller = path.caller()
        pages = path.stored_pages(caller, 2 if case.quick else 4)
        hashes = list(pages)
        for late, later in zip(hashes[::2], hashes[1::2], strict=True):
            _time_out(path, partial(caller.get, [late]))
            _must_be_right(path, caller, later, pages)
            for page_hash in hashes:
                _must_be_right(path, caller, page_hash, pages)


@check("KV-305")
def a_late_page_is_not_taken_for_one_that_is_awaited(case: Case) -> None:
    """If the reply of a get that timed out comes while the next get waits, it is not its page."""
    with open_fault_path(case, 4 << 10) as path:
        caller = path.caller()
        late, awaited = (dict([page]) for page in path.stored_pages(caller, 2).items())
        path.on_all(partial(FaultProxy.go_silent, direction="down"))
        must_not_be_foreign(path, caller.get(list(late)))
        with Threads() as threads:
            getting = threads.start(lambda: _get_at_once(path, caller, awaited))
            wait_until(lambda: getting.done, path.timeout_s / 4)  # the requests are on their way
            path.on_all(FaultProxy.pass_through)
            getting.result()


def _get_at_once(path: FaultPath, caller: Caller, pages: Mapping[str, bytes]) -> None:
    """Get a page over each connection. A get may fail or miss, but must not have another page."""
    ((page_hash, data),) = pages.items()
    for attempt in call_at_once([partial(caller.get, [page_hash])] * path.width):
        must_not_be_foreign(path, attempt)
        if attempt.error is None and attempt.answer != [None]:
            _must_hold(path, caller, page_hash, attempt.answer, data)


@check("KV-305")
def a_page_of_an_interrupted_get_is_not_taken_for_a_later_one(case: Case) -> None:
    """If KeyboardInterrupt ends a get and its reply comes at last, no other get returns its page."""
    with open_fault_path(case, 4 << 10) as path:
        caller = path.caller()
        pages = path.stored_pages(caller, 3)
        claims = case.subject.storage_class, path.config
        arguments = (path.space, list(pages), 2 * path.width)
        with Child(*claims, _get_after_an_interrupt, *arguments, absent=case.absent) as child:
            receive_result(child)
            path.on_all(partial(FaultProxy.go_silent, direction="down"))
            child.send("no reply comes")
            child.receive(RECOVERY_LIMIT_S)
            path.on_all(FaultProxy.pass_through)
            child.send("the reply comes")
            found: list[tuple[str, bytes]] = child.receive(RECOVERY_LIMIT_S)
    for page_hash, data in found:
        _must_hold(path, caller, page_hash, [data], pages[page_hash])


def _get_after_an_interrupt(link: Link, space: KeySpace, hashes: list[str], count: int) -> None:
    """Actor: interrupt a get of the first page. Send what gets of the others return afterwards."""
    probe = link.open()
    probe.open_space(space)
    probe.get(space, hashes)
    (first, *others), (page,) = hashes, probe.memory(space, 1).pages
    link.send("ready")
    link.receive()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, _INTERRUPTED_AFTER_S)
    with suppress(KeyboardInterrupt, HiCacheError):
        probe.storage.batch_get(space, [first], [page])
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    link.send("interrupted")
    link.receive()
    found: list[tuple[str, bytes]] = []
    for page_hash in others * count:
        with suppress(HiCacheError):
            if probe.storage.batch_get(space, [page_hash], [page]) == [True]:
                found.append((page_hash, page.tobytes()))
    link.send(found)


@check("KV-305")
def a_late_verdict_is_not_taken_for_a_later_one(case: Case) -> None:
    """If a lookup or a set timed out, the next lookup does not return its verdict."""
    with open_fault_path(case, 4 << 10) as path:
        caller = path.caller()
        ((page_hash, data),) = path.stored_pages(caller, 1).items()
        calls: dict[str, Callable[[], Attempt]] = {
            "batch_exists": lambda: caller.exists([page_hash]),
            "batch_set": lambda: caller.set({page_hash: data}),
        }
        if case.quick:
            del calls["batch_set"]
        for operation, call in calls.items():
            _time_out(path, call)
            for _ in range(2 * path.width):
                (absent,) = case.hashes(1)
                seen = caller.exists([absent])
                must_not_be_foreign(path, seen)
                if seen.answer == [True]:
                    raise caller.probe.violation(
                        f"batch_exists is True for a page that never was, after a {operation} that"
                        " timed out: a late reply was taken for a later one",
                        expected="False, or an exception",
                        got="True",
                    )


@check("KV-305", Need.SERVER)
def it_works_again_after_the_server_was_restarted(case: Case) -> None:
    """The same storage works again, in an open key space, after the server was stopped and started."""
    with case.server() as server:
        path = open_direct_path(case, dict(case.config))
        caller = path.caller()
        _all_at_once(path, caller)
        server.stop()
        _all_at_once(path, caller)
        server.start()
        must_work_again(path, caller, "the server was stopped and started")
        server.stop()
        server.start()
        must_work_again(path, caller, "the server was restarted between two calls")


@check("KV-305", Need.SERVER, quick=False)
def it_works_again_after_the_server_was_paused(case: Case) -> None:
    """The same storage works again after the server was paused and resumed."""
    with case.server() as server:
        path = open_direct_path(case, dict(case.config))
        caller = path.caller()
        _all_at_once(path, caller)
        server.pause()
        _all_at_once(path, caller)
        server.resume()
        must_work_again(path, caller, "the server was paused")


@check("KV-305", quick=False)
def what_did_not_open_opens_when_the_server_is_there(case: Case) -> None:
    """A storage that is opened without its server works once the server is there, or opens then."""
    with open_fault_path(case, 4 << 10) as path:
        path.on_all(FaultProxy.refuse)
        try:
            early = case.open_storage(path.config)
        except (StorageUnavailable, StorageTimeout):
            early = None
        path.on_all(FaultProxy.pass_through)
        caller = path.caller() if early is None else path.caller_of(early)
        must_work_again(path, caller, "it was opened without its server", is_open=early is None)


def _all_at_once(path: FaultPath, caller: Caller, *, twice: bool = False) -> None:
    """Make calls of several kinds at once, one for each connection. The calls may fail."""
    for _ in range(1 + twice):
        pages = path.case.contents(path.space, path.case.hashes(max(path.width, 3)))
        calls: list[Callable[[], Attempt]] = []
        for number, (page_hash, data) in enumerate(pages.items()):
            kinds = (
                partial(caller.get, [page_hash]),
                partial(caller.exists, [page_hash]),
                partial(caller.set, {page_hash: data}),
            )
            calls.append(kinds[number % len(kinds)])
        for attempt in call_at_once(calls):
            must_not_be_foreign(path, attempt)


def must_work_again(path: FaultPath, caller: Caller, why: str, *, is_open: bool = True) -> None:
    """Repeat rounds on every connection until enough in a row succeed. Raise if that takes too long.

    A round opens the key space only if `caller` has not: callers open it once, before their first set.
    """
    until_s = time.monotonic() + RECOVERY_LIMIT_S
    good, last = 0, ""
    while good < _GOOD_ROUNDS:
        if time.monotonic() > until_s:
            raise Violation(
                f"the storage does not work again after {why}",
                f"calls that succeed within {RECOVERY_LIMIT_S:g} s, on every connection",
                last,
                path.case.trace.sequence(),
            )
        pages = path.case.contents(path.space, path.case.hashes(path.width))
        rounds = [
            partial(_round, path, caller, {name: data}, is_open=is_open)
            for name, data in pages.items()
        ]
        failures = [failure for failure in _on_every_connection(path, rounds) if failure]
        good = 0 if failures else good + 1
        last = failures[0] if failures else last
        if failures:
            time.sleep(0.05)  # A breaker closes only after a pause.


def _on_every_connection(path: FaultPath, calls: Sequence[Callable[[], str]]) -> list[str]:
    """Make calls at once. No reply comes before each has sent a request, so none waits for another.

    Else a machine may run one call after the other, over the same connection.
    """
    turns = path.turns()
    path.on_all(partial(FaultProxy.go_silent, direction="down"))
    with Threads() as threads:
        calling = threads.start(lambda: call_at_once(calls))
        wait_until(lambda: calling.done or path.turns() - turns >= len(calls), path.timeout_s / 4)
        path.on_all(FaultProxy.pass_through)
        return calling.result()


def _round(path: FaultPath, caller: Caller, page: Mapping[str, bytes], *, is_open: bool) -> str:
    """Set, read, look up and delete one page. Return what went wrong, or ""."""
    ((page_hash, data),) = page.items()
    steps = (
        *(() if is_open else ((caller.open_space, [None]),)),
        (partial(caller.set, page), [[True]]),
        (partial(caller.get, [page_hash]), [[data]] if path.case.keeps else [[data], [None]]),
        (partial(caller.exists, [page_hash]), [[True]] if path.case.keeps else [[True], [False]]),
        (partial(caller.delete, [page_hash]), [[True]]),
    )
    for step, right in steps:
        attempt = step()
        must_not_be_foreign(path, attempt)
        if attempt.operation == "batch_get" and attempt.error is None and attempt.answer != [None]:
            _must_hold(path, caller, page_hash, attempt.answer, data)
        if attempt.error is not None or attempt.answer not in right:
            return f"{attempt.operation}: {attempt.text}"
    return ""


def _time_out(path: FaultPath, call: Callable[[], Attempt]) -> None:
    """Make a call whose reply is held until the call has timed out, and is delivered then."""
    path.on_all(partial(FaultProxy.go_silent, direction="down"))
    attempt = call()
    must_not_be_foreign(path, attempt)
    path.on_all(FaultProxy.pass_through)
    if not isinstance(attempt.error, (StorageTimeout, StorageUnavailable)):
        raise Violation(
            f"{attempt.operation} did not raise, although nothing came from the server",
            "StorageTimeout",
            attempt.text,
            path.case.trace.sequence(attempt.operation),
        )


def _must_be_right(
    path: FaultPath, caller: Caller, page_hash: str, pages: Mapping[str, bytes]
) -> None:
    attempt = caller.get([page_hash])
    must_not_be_foreign(path, attempt)
    if attempt.error is None and attempt.answer != [None]:
        _must_hold(path, caller, page_hash, attempt.answer, pages[page_hash])


def _must_hold(
    path: FaultPath, caller: Caller, page_hash: str, answer: list[bytes], data: bytes
) -> None:
    if answer != [data]:
        raise path.case.wrong_bytes(caller.probe, path.space, page_hash, answer[0], [data])
