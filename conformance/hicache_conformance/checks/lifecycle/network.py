"""KV-304: if its server is away or silent, a store raises in time, and nothing hangs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.run.outcomes import NotDeclared, Violation
from hicache_conformance.scenarios.attempts import call_at_once, make_attempt
from hicache_conformance.scenarios.fault_path import (
    RECOVERY_LIMIT_S,
    FaultPath,
    full_listener,
    must_end_in_time,
    open_direct_path,
    open_fault_path,
)
from hicache_conformance.tools.network.proxy import FaultProxy, endpoints_in, redirected
from hicache_conformance.tools.processes.resources import wait_until
from hicache_conformance.tools.processes.threads import Threads
from hicache_storage.errors import StorageClosed, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache_conformance.case.case import Case
    from hicache_conformance.scenarios.attempts import Attempt, Caller

_LARGE_NBYTES = 24 << 20
"""More bytes than the buffers of the kernel and of a proxy hold."""

_SETS_AT_ONCE = 6
"""If so many calls wait for each other, the last ones are late by several time limits."""

Calls = dict[str, "Callable[[], Attempt]"]
_FAILURES = (StorageUnavailable, StorageTimeout)
_CLOSE_LIMIT_S = 12.0
"""How long close may take: ten seconds, and more on a busy machine."""


@check("KV-304")
def a_server_that_refuses_is_unavailable(case: Case) -> None:
    """If the server refuses connections, every call raises StorageUnavailable in time."""
    with open_fault_path(case) as path:
        calls = _calls(path, opening=True)
        for attempt in _call_during(path, calls, partial(path.on_all, FaultProxy.refuse)):
            _must_raise(path, attempt, StorageUnavailable, "the server refuses connections")


@check("KV-304")
def a_silent_server_is_a_timeout(case: Case) -> None:
    """If the server accepts and never answers, every call raises StorageTimeout in time."""
    with open_fault_path(case) as path:
        calls = _calls(path, opening=True)
        for attempt in _call_during(path, calls, partial(path.on_all, FaultProxy.go_silent)):
            kind = _FAILURES if attempt.operation == "from_config" else StorageTimeout
            _must_raise(path, attempt, kind, "the server never answers")


@check("KV-304", quick=False)
def no_other_call_hangs_or_raises_what_is_foreign(case: Case) -> None:
    """If the server is silent, opening a key space, listings, clear, stats and close end in time."""
    with open_fault_path(case) as path:
        for why, fault in (
            ("the server never answers", FaultProxy.go_silent),
            ("the server refuses connections", FaultProxy.refuse),
        ):
            for attempt in _call_during(path, _serverless_calls(path), partial(path.on_all, fault)):
                must_end_in_time(path, attempt, why)
                if attempt.operation in ("stats", "close") and attempt.error is not None:
                    raise Violation(
                        f"{attempt.operation} raised {type(attempt.error).__name__} when {why}",
                        "no exception: it needs no server",
                        attempt.text,
                        case.trace.sequence(attempt.operation),
                    )


@check("KV-304", quick=False)
def a_large_set_to_a_silent_server_is_a_timeout(case: Case) -> None:
    """If the server is silent, a set of a page that fills all network buffers ends in time."""
    limit = case.claims.max_page_nbytes
    if limit is not None and limit < _LARGE_NBYTES:
        raise NotDeclared(f"the store takes pages of up to {limit} bytes, not {_LARGE_NBYTES}")
    with open_fault_path(case) as path:
        caller = replace(path, space=case.space(_LARGE_NBYTES)).caller()
        pages = case.contents(caller.space, case.hashes(1))
        path.on_all(FaultProxy.go_silent)
        must_end_in_time(path, caller.set(pages), "the server reads nothing")


@check("KV-304", quick=False)
def a_server_that_does_not_accept_is_an_error_in_time(case: Case) -> None:
    """If the server neither accepts nor refuses, connecting ends within `timeout_s` too."""
    with open_fault_path(case) as path, full_listener() as address:
        caller = path.caller()
        nowhere = redirected(path.config, dict.fromkeys(endpoints_in(path.config), address))
        tries = [replace(path, config=nowhere).open_and_call(caller) for _ in range(2)]
        attempt = min(tries, key=lambda one: one.own_s)
        _must_raise(path, attempt, _FAILURES, "the server accepts no connection")


@check("KV-304", quick=False)
def a_server_that_drips_is_a_timeout(case: Case) -> None:
    """`timeout_s` limits the whole call: a reply that drips byte by byte does not prolong it."""
    with open_fault_path(case) as path:
        calls = _calls(path)
        nbytes_per_s = path.space.stored_nbytes / (10 * path.timeout_s)
        slow = partial(path.on_all, partial(FaultProxy.drip, nbytes_per_s=nbytes_per_s))
        only_get = {name: call for name, call in calls.items() if name == "batch_get"}
        for attempt in _call_during(path, only_get, slow):
            must_end_in_time(path, attempt, "a reply comes slower than the call may take")
        slower = partial(path.on_all, partial(FaultProxy.drip, nbytes_per_s=2))
        for attempt in _call_during(path, calls, slower):
            must_end_in_time(path, attempt, "requests and replies come byte by byte")


@check("KV-304", quick=False)
def silence_in_the_middle_of_a_reply_is_an_error(case: Case) -> None:
    """If a reply stops half way, the call ends in time with an exception or a miss."""
    with open_fault_path(case) as path:
        calls = _calls(path)
        before = _bytes_down(path)
        path.on_all(
            partial(FaultProxy.drip, nbytes_per_s=path.space.stored_nbytes / path.timeout_s)
        )
        with Threads() as threads:
            getting = threads.start(calls["batch_get"])
            wait_until(lambda: _bytes_down(path) > before, path.timeout_s)
            path.on_all(FaultProxy.go_silent)
            attempt = getting.result()
        must_end_in_time(path, attempt, "a reply stops half way")


@check("KV-304", quick=False)
def calls_that_wait_for_a_connection_are_in_time(case: Case) -> None:
    """If more calls run than there are connections, each call still ends within its time limit."""
    with open_fault_path(case) as path:
        caller = path.caller()
        pages = path.stored_pages(caller, 3 * path.width + 1)

        def all_at_once() -> list[Attempt]:
            path.on_all(FaultProxy.go_silent)
            return call_at_once([partial(caller.get, [page_hash]) for page_hash in pages])

        attempts = all_at_once()
        if max(one.own_s for one in attempts) > path.limit_s:
            path.on_all(FaultProxy.pass_through)
            path.answer_of(lambda: caller.exists(["0" * 64]))
            attempts = min(
                (attempts, all_at_once()), key=lambda all_: max(one.own_s for one in all_)
            )
        for one in attempts:
            must_end_in_time(path, one, f"{len(attempts)} calls at once wait for a silent server")


@check("KV-304")
def sets_at_once_to_a_silent_server_end_in_time(case: Case) -> None:
    """If several sets wait for a silent server, each ends within its time limit, as do other calls."""
    with open_fault_path(case, 4 << 10) as path:
        caller = path.caller()
        path.stored_pages(caller, 1)
        for operation in ("batch_set",) if case.quick else ("batch_set", "batch_delete"):
            _must_end_at_once(path, caller, operation)


def _must_end_at_once(path: FaultPath, caller: Caller, operation: str) -> None:
    """Make calls of one kind at once. If one is late, try again: the machine may be busy."""

    def all_at_once() -> list[Attempt]:
        pages = path.case.contents(path.space, path.case.hashes(max(_SETS_AT_ONCE, path.width)))
        calls: list[Callable[[], Attempt]] = [
            partial(caller.set, {page_hash: data})
            if operation == "batch_set"
            else partial(caller.delete, [page_hash])
            for page_hash, data in pages.items()
        ]
        path.on_all(FaultProxy.go_silent)
        try:
            return call_at_once(calls)
        finally:
            path.on_all(FaultProxy.drop_held)
            path.on_all(FaultProxy.pass_through)

    attempts = all_at_once()
    if max(one.own_s for one in attempts) > path.limit_s:
        path.answer_of(lambda: caller.exists(["0" * 64]))
        attempts = min((attempts, all_at_once()), key=lambda all_: max(one.own_s for one in all_))
    for one in attempts:
        must_end_in_time(path, one, f"{len(attempts)} calls at once wait for a silent server")
    path.answer_of(lambda: caller.exists(["0" * 64]))


@check("KV-304", quick=False)
def a_reply_cut_short_is_no_hit(case: Case) -> None:
    """If a connection breaks in a request or a reply, the call raises, misses, or tries again."""
    with open_fault_path(case, 8 << 10) as path:
        cuts = list(_cuts(path.space.stored_nbytes))
        caller = path.caller()
        pages = path.stored_pages(caller, len(cuts))
        for cut, (page_hash, data) in zip(cuts, pages.items(), strict=True):
            if case.claims.shared:
                caller = path.caller()  # The breaker of a new handle is closed.
            path.on_all(cut)
            found = caller.get([page_hash])
            must_end_in_time(path, found, "its connection breaks")
            if found.error is None and found.answer not in ([data], [None]):
                raise case.wrong_bytes(
                    caller.probe, path.space, page_hash, found.answer[0] or b"", [data]
                )
            path.on_all(cut)
            _must_be_absent(path, caller)
            path.on_all(FaultProxy.pass_through)


def _must_be_absent(path: FaultPath, caller: Caller) -> None:
    seen = caller.exists(path.case.hashes(1))
    must_end_in_time(path, seen, "its connection breaks")
    if seen.answer == [True]:
        raise caller.probe.violation(
            "batch_exists is True for a page that is not there, when its reply is cut short",
            expected="False or StorageUnavailable",
            got="True",
        )


@check("KV-304", quick=False)
def a_set_whose_connection_breaks_tells_the_truth(case: Case) -> None:
    """If the connection of a set breaks, the set raises or returns a verdict that is true."""
    with open_fault_path(case, 8 << 10) as path:
        caller = path.caller()
        for nbytes in (0, 1, path.space.stored_nbytes // 2, 2 * path.space.stored_nbytes):
            for direction in ("up", "down"):
                pages = case.contents(path.space, case.hashes(1))
                cut_at = nbytes if direction == "up" else 0
                path.on_all(partial(FaultProxy.reset_after, nbytes=cut_at, direction=direction))
                attempt = caller.set(pages)
                path.on_all(FaultProxy.pass_through)
                must_end_in_time(path, attempt, "its connection breaks")
                _must_be_true(path, attempt, pages)


def _must_be_true(path: FaultPath, attempt: Attempt, pages: dict[str, bytes]) -> None:
    """Raise if the verdict of a set contradicts a read through another handle."""
    case = path.case
    reader = path.caller("reader")
    found = path.answer_of(partial(reader.get, list(pages)))
    if not case.claims.shared:
        return
    lies = {
        "True": attempt.answer == [True] and found == [None] and case.keeps,
        "False": attempt.answer == [False] and found != [None],
    }
    for verdict in (verdict for verdict, lie in lies.items() if lie):
        raise reader.probe.violation(
            f"batch_set returned {verdict}, its connection broke, and the page is"
            f" {'not there' if verdict == 'True' else 'there (KV-006)'}",
            expected="StorageUnavailable if the store can't know, or a correct verdict",
            got=f"{verdict}, and then {'a miss' if found == [None] else 'a hit'}",
        )


@check("KV-304", quick=False)
def close_does_not_wait_for_a_silent_server(case: Case) -> None:
    """Close returns within 10 s while the server is silent and a call is running."""
    with open_fault_path(case) as path:
        caller = path.caller()
        pages = path.stored_pages(caller, 1)
        path.on_all(FaultProxy.go_silent)
        sent = _bytes_held(path)
        with Threads() as threads:
            getting = threads.start(lambda: caller.get(list(pages)))
            wait_until(lambda: getting.done or _bytes_held(path) > sent, path.timeout_s)
            closed = caller.close()
            found = getting.result()
        if closed.error is not None or closed.own_s > _CLOSE_LIMIT_S:
            raise caller.probe.violation(
                "close failed or took too long, with a call that waits for a silent server",
                expected="close returns within 10 s",
                got=f"{closed.text} after {closed.duration_text}",
            )
        if not isinstance(found.error, StorageClosed):
            must_end_in_time(path, found, "the storage is closed during the call")


@check("KV-304", Need.SERVER)
def a_server_that_stops_is_unavailable(case: Case) -> None:
    """If the server has stopped, every call raises StorageUnavailable."""
    with case.server() as server:
        path = open_direct_path(case, dict(case.config))
        calls = _calls(path, opening=True)
        for attempt in _call_during(path, calls, server.stop, server.start):
            _must_raise(path, attempt, StorageUnavailable, "the server has stopped")


@check("KV-304", Need.SERVER)
def a_server_that_is_paused_is_a_timeout(case: Case) -> None:
    """If the server is paused (SIGSTOP), every call raises StorageTimeout."""
    with case.server() as server:
        path = open_direct_path(case, dict(case.config))
        calls = _calls(path, opening=True)
        for attempt in _call_during(path, calls, server.pause, server.resume):
            kind = _FAILURES if attempt.operation == "from_config" else StorageTimeout
            _must_raise(path, attempt, kind, "the server is paused")


def _calls(path: FaultPath, *, opening: bool = False) -> Calls:
    """Return one call of each kind, on handles that have been in use. No call waits for another."""
    names = ("exists", "get", "set", "delete")
    if path.case.claims.shared:
        callers = {name: path.caller(name) for name in names}
    else:
        callers = dict.fromkeys(names, path.caller())  # The store may allow one handle at a time.
    (page_hash,) = path.stored_pages(callers["get"], 1)
    fresh = path.case.contents(path.space, path.case.hashes(1))
    (absent,) = path.case.hashes(1)
    for caller in callers.values():
        path.answer_of(partial(caller.exists, [absent]))
    calls: Calls = {
        "batch_exists": partial(callers["exists"].exists, [page_hash]),
        "batch_get": partial(callers["get"].get, [page_hash]),
        "batch_set": partial(callers["set"].set, fresh),
        "batch_delete": partial(callers["delete"].delete, [absent]),
    }
    if opening:
        calls["from_config"] = partial(path.open_and_call, callers["exists"])
    return calls


def _serverless_calls(path: FaultPath) -> Calls:
    """Return the calls that a store may answer without its server, each on a handle of its own."""
    names = ["open_space", "stats", "close"]
    if path.case.claims.enumerable:
        names += ["spaces", "scan", "clear"]
    calls: Calls = {}
    for name in names:
        caller = path.caller(name)
        elsewhere = replace(path.space, tenant=f"new to {name}")
        storage = caller.probe.storage
        by_name: dict[str, Callable[[], object]] = {
            "open_space": partial(storage.open_space, elsewhere),
            "stats": storage.stats,
            "close": storage.close,
            "spaces": partial(_listed, storage.spaces),
            "scan": partial(_listed, partial(storage.scan, path.space)),
            "clear": partial(storage.clear, elsewhere),
        }
        calls[name] = partial(
            make_attempt, caller.probe, name, by_name[name], limit_s=caller.limit_s
        )
    return calls


def _listed(call: Callable[[], Iterator[object]]) -> list[object]:
    return list(call())


def _call_during(
    path: FaultPath,
    calls: Calls,
    fault: Callable[[], object],
    end: Callable[[], object] | None = None,
) -> list[Attempt]:
    """Make all calls at once during a fault. If one is late, try again: the machine may be busy."""
    end = end or partial(path.on_all, FaultProxy.pass_through)
    # Calls on one handle would wait for each other.
    in_turn = not path.case.claims.shared

    def call_all() -> list[Attempt]:
        fault()
        try:
            return (
                [call() for call in calls.values()] if in_turn else call_at_once([*calls.values()])
            )
        finally:
            end()

    attempts = call_all()
    if max(one.own_s for one in attempts) <= path.limit_s:
        return attempts
    wait_until(lambda: all(one().error is None for one in calls.values()), RECOVERY_LIMIT_S)
    return [min(pair, key=lambda one: one.own_s) for pair in zip(attempts, call_all(), strict=True)]


def _must_raise(
    path: FaultPath,
    attempt: Attempt,
    kind: type[Exception] | tuple[type[Exception], ...],
    why: str,
) -> None:
    must_end_in_time(path, attempt, why)
    if not isinstance(attempt.error, kind):
        names = [one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,))]
        result = f"raised {type(attempt.error).__name__}" if attempt.error else "did not raise"
        raise Violation(
            f"{attempt.operation} {result} when {why}",
            " or ".join(names),
            attempt.text,
            path.case.trace.sequence(attempt.operation),
        )


def _cuts(page_nbytes: int) -> Iterator[Callable[[FaultProxy], None]]:
    """Yield ways to end a connection before, in and after the bytes of a page."""
    yield partial(FaultProxy.reset_after, nbytes=0, direction="up")
    for nbytes in (0, 1, 7, page_nbytes // 2, page_nbytes - 1):
        yield partial(FaultProxy.reset_after, nbytes=nbytes, direction="down")
        yield partial(FaultProxy.truncate_after, nbytes=nbytes)


def _bytes_down(path: FaultPath) -> int:
    return sum(proxy.bytes_down for proxy in path.proxies)


def _bytes_held(path: FaultPath) -> int:
    return sum(proxy.held for proxy in path.proxies)
