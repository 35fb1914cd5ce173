"""KV-304: a store whose server is gone, or says nothing, is an error in time; nothing hangs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.run.outcomes import NotVerified, Violation
from hicache_conformance.scenarios.attempts import attempted, side_by_side
from hicache_conformance.scenarios.fault_path import (
    PATIENCE_S,
    FaultPath,
    direct_road,
    foreign,
    nobody_accepts,
    road,
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
"""More than the kernel and a proxy take in."""

Calls = dict[str, "Callable[[], Attempt]"]
_FAILURES = (StorageUnavailable, StorageTimeout)
_CLOSE_LIMIT_S = 12.0
"""Ten seconds, and what a busy machine takes."""


@check("KV-304")
def a_server_that_refuses_is_unavailable(case: Case) -> None:
    """Every call raises StorageUnavailable, in time, when the server refuses connections."""
    with road(case) as way:
        calls = _calls(way, opening=True)
        for made in _struck(way, calls, partial(way.all, FaultProxy.refuse)):
            _must_raise(way, made, StorageUnavailable, "the server refuses connections")


@check("KV-304")
def a_silent_server_is_a_timeout(case: Case) -> None:
    """Every call raises StorageTimeout, in time, when the server accepts and never answers."""
    with road(case) as way:
        calls = _calls(way, opening=True)
        for made in _struck(way, calls, partial(way.all, FaultProxy.go_silent)):
            kind = _FAILURES if made.operation == "from_config" else StorageTimeout
            _must_raise(way, made, kind, "the server never answers")


@check("KV-304", quick=False)
def no_other_call_hangs_or_raises_what_is_foreign(case: Case) -> None:
    """Opening a key space, listings, clear, stats and close end in time when the server is silent."""
    with road(case) as way:
        for why, fault in (
            ("the server never answers", FaultProxy.go_silent),
            ("the server refuses connections", FaultProxy.refuse),
        ):
            for made in _struck(way, _lesser_calls(way), partial(way.all, fault)):
                _must_end(way, made, why)
                if made.operation in ("stats", "close") and made.error is not None:
                    raise Violation(
                        f"{made.operation} raised {type(made.error).__name__} when {why}",
                        "no exception: it needs no server",
                        made.text,
                        case.trace.sequence(made.operation),
                    )


@check("KV-304", quick=False)
def a_large_set_to_a_silent_server_is_a_timeout(case: Case) -> None:
    """A page that is larger than what the network holds does not hang on its way to a silent server."""
    limit = case.claims.max_page_nbytes
    if limit is not None and limit < _LARGE_NBYTES:
        raise NotVerified(f"the store takes no pages of {_LARGE_NBYTES} bytes")
    with road(case) as way:
        caller = replace(way, space=case.space(_LARGE_NBYTES)).caller()
        pages = case.contents(caller.space, case.hashes(1))
        way.all(FaultProxy.go_silent)
        _must_end(way, caller.set(pages), "the server reads nothing")


@check("KV-304", quick=False)
def a_server_that_does_not_accept_is_an_error_in_time(case: Case) -> None:
    """`timeout_s` holds for connecting too, where the server neither accepts nor refuses."""
    with road(case) as way, nobody_accepts() as address:
        caller = way.caller()
        nowhere = redirected(way.config, dict.fromkeys(endpoints_in(way.config), address))
        tries = [replace(way, config=nowhere).open_and_call(caller) for _ in range(2)]
        made = min(tries, key=lambda one: one.elapsed_s)
        _must_raise(way, made, _FAILURES, "the server accepts no connection")


@check("KV-304", quick=False)
def a_server_that_drips_is_a_timeout(case: Case) -> None:
    """`timeout_s` is for the call as a whole: a reply that comes byte by byte does not prolong it."""
    with road(case) as way:
        calls = _calls(way)
        nbytes_per_s = way.space.stored_nbytes / (10 * way.timeout_s)
        slow = partial(way.all, partial(FaultProxy.drip, nbytes_per_s=nbytes_per_s))
        only_get = {name: call for name, call in calls.items() if name == "batch_get"}
        for made in _struck(way, only_get, slow):
            _must_end(way, made, "a reply comes slower than the call may take")
        slower = partial(way.all, partial(FaultProxy.drip, nbytes_per_s=2))
        for made in _struck(way, calls, slower):
            _must_end(way, made, "requests and replies come byte by byte")


@check("KV-304", quick=False)
def silence_in_the_middle_of_a_reply_is_an_error(case: Case) -> None:
    """A reply that stops half way ends the call in time, with an exception or a miss."""
    with road(case) as way:
        calls = _calls(way)
        before = _bytes_down(way)
        way.all(partial(FaultProxy.drip, nbytes_per_s=way.space.stored_nbytes / way.timeout_s))
        with Threads() as crew:
            getting = crew.start(calls["batch_get"])
            wait_until(lambda: _bytes_down(way) > before, way.timeout_s)
            way.all(FaultProxy.go_silent)
            made = getting.result()
        _must_end(way, made, "a reply stops half way")


@check("KV-304", quick=False)
def calls_that_wait_for_a_connection_are_in_time(case: Case) -> None:
    """With more calls at once than connections, each still ends in its own time."""
    with road(case) as way:
        caller = way.caller()
        pages = way.planted(caller, 3 * way.width + 1)

        def all_at_once() -> list[Attempt]:
            way.all(FaultProxy.go_silent)
            return side_by_side([partial(caller.get, [page_hash]) for page_hash in pages])

        made = all_at_once()
        if max(one.elapsed_s for one in made) > way.limit_s:
            way.all(FaultProxy.pass_through)
            way.in_time(lambda: caller.exists(["0" * 64]))
            made = min((made, all_at_once()), key=lambda all_: max(one.elapsed_s for one in all_))
        for one in made:
            _must_end(way, one, f"{len(made)} calls at once wait for a silent server")


@check("KV-304", quick=False)
def a_reply_cut_short_is_no_hit(case: Case) -> None:
    """A connection that breaks in a request or a reply is an exception, a miss, or retried."""
    with road(case, 8 << 10) as way:
        cuts = list(_cuts(way.space.stored_nbytes))
        caller = way.caller()
        pages = way.planted(caller, len(cuts))
        for cut, (page_hash, data) in zip(cuts, pages.items(), strict=True):
            if case.claims.shared:
                caller = way.caller()  # one that a breaker keeps from nothing
            way.all(cut)
            found = caller.get([page_hash])
            _must_end(way, found, "its connection breaks")
            if found.error is None and found.answer not in ([data], [None]):
                raise case.wrong_bytes(
                    caller.probe, way.space, page_hash, found.answer[0] or b"", [data]
                )
            way.all(cut)
            _must_be_absent(way, caller)
            way.all(FaultProxy.pass_through)


def _must_be_absent(way: FaultPath, caller: Caller) -> None:
    seen = caller.exists(way.case.hashes(1))
    _must_end(way, seen, "its connection breaks")
    if seen.answer == [True]:
        raise caller.probe.violation(
            "batch_exists is True for a page that is not there, when its reply is cut short",
            expected="False or StorageUnavailable",
            got="True",
        )


@check("KV-304", quick=False)
def a_set_whose_connection_breaks_tells_the_truth(case: Case) -> None:
    """A set whose connection breaks is an exception, or a verdict that is true."""
    with road(case, 8 << 10) as way:
        caller = way.caller()
        for nbytes in (0, 1, way.space.stored_nbytes // 2, 2 * way.space.stored_nbytes):
            for direction in ("up", "down"):
                pages = case.contents(way.space, case.hashes(1))
                cut_at = nbytes if direction == "up" else 0
                way.all(partial(FaultProxy.reset_after, nbytes=cut_at, direction=direction))
                made = caller.set(pages)
                way.all(FaultProxy.pass_through)
                _must_end(way, made, "its connection breaks")
                _must_be_true(way, made, pages)


def _must_be_true(way: FaultPath, made: Attempt, pages: dict[str, bytes]) -> None:
    """Hold the verdict of a set against what another handle reads."""
    case = way.case
    reader = way.caller("reader")
    found = way.in_time(partial(reader.get, list(pages)))
    if not case.claims.shared:
        return
    lies = {
        "True": made.answer == [True] and found == [None] and case.keeps,
        "False": made.answer == [False] and found != [None],
    }
    for verdict in (verdict for verdict, lie in lies.items() if lie):
        raise reader.probe.violation(
            f"batch_set returned {verdict}, its connection broke, and the page is"
            f" {'not there' if verdict == 'True' else 'there (KV-006)'}",
            expected="StorageUnavailable where the store can't know, or a verdict that is true",
            got=f"{verdict}, and then {'a miss' if found == [None] else 'a hit'}",
        )


@check("KV-304", quick=False)
def close_does_not_wait_for_a_silent_server(case: Case) -> None:
    """Close returns within 10 s while the server is silent and a call is running."""
    with road(case) as way:
        caller = way.caller()
        pages = way.planted(caller, 1)
        way.all(FaultProxy.go_silent)
        sent = _bytes_held(way)
        with Threads() as crew:
            getting = crew.start(lambda: caller.get(list(pages)))
            wait_until(lambda: getting.done or _bytes_held(way) > sent, way.timeout_s)
            closed = caller.close()
            found = getting.result()
        if closed.error is not None or closed.elapsed_s > _CLOSE_LIMIT_S:
            raise caller.probe.violation(
                "close failed or took too long, with a call that waits for a silent server",
                expected="close returns within 10 s",
                got=f"{closed.text} after {closed.elapsed_s:.1f} s",
            )
        if not isinstance(found.error, StorageClosed):
            _must_end(way, found, "the storage is closed meanwhile")


@check("KV-304", Need.SERVER)
def a_server_that_stops_is_unavailable(case: Case) -> None:
    """Every call raises StorageUnavailable when the server has stopped."""
    with case.server() as server:
        way = direct_road(case, dict(case.config))
        calls = _calls(way, opening=True)
        for made in _struck(way, calls, server.stop, server.start):
            _must_raise(way, made, StorageUnavailable, "the server has stopped")


@check("KV-304", Need.SERVER)
def a_server_that_is_paused_is_a_timeout(case: Case) -> None:
    """Every call raises StorageTimeout when the server is paused (SIGSTOP)."""
    with case.server() as server:
        way = direct_road(case, dict(case.config))
        calls = _calls(way, opening=True)
        for made in _struck(way, calls, server.pause, server.resume):
            kind = _FAILURES if made.operation == "from_config" else StorageTimeout
            _must_raise(way, made, kind, "the server is paused")


def _calls(way: FaultPath, *, opening: bool = False) -> Calls:
    """One of each kind, on a handle each: none waits for another. Every handle has been in use."""
    names = ("exists", "get", "set", "delete")
    if way.case.claims.shared:
        callers = {name: way.caller(name) for name in names}
    else:
        callers = dict.fromkeys(names, way.caller())  # there may be only one
    (page_hash,) = way.planted(callers["get"], 1)
    fresh = way.case.contents(way.space, way.case.hashes(1))
    (absent,) = way.case.hashes(1)
    for caller in callers.values():
        way.in_time(partial(caller.exists, [absent]))
    calls: Calls = {
        "batch_exists": partial(callers["exists"].exists, [page_hash]),
        "batch_get": partial(callers["get"].get, [page_hash]),
        "batch_set": partial(callers["set"].set, fresh),
        "batch_delete": partial(callers["delete"].delete, [absent]),
    }
    if opening:
        calls["from_config"] = partial(way.open_and_call, callers["exists"])
    return calls


def _lesser_calls(way: FaultPath) -> Calls:
    """The calls that a store may answer without its server, on a handle each."""
    names = ["open_space", "stats", "close"]
    if way.case.claims.enumerable:
        names += ["spaces", "scan", "clear"]
    calls: Calls = {}
    for name in names:
        caller = way.caller(name)
        elsewhere = replace(way.space, tenant=f"new to {name}")
        storage = caller.probe.storage
        made: dict[str, Callable[[], object]] = {
            "open_space": partial(storage.open_space, elsewhere),
            "stats": storage.stats,
            "close": storage.close,
            "spaces": partial(_listed, storage.spaces),
            "scan": partial(_listed, partial(storage.scan, way.space)),
            "clear": partial(storage.clear, elsewhere),
        }
        calls[name] = partial(attempted, caller.probe, name, made[name], limit_s=caller.limit_s)
    return calls


def _listed(call: Callable[[], Iterator[object]]) -> list[object]:
    return list(call())


def _struck(
    way: FaultPath,
    calls: Calls,
    fault: Callable[[], object],
    end: Callable[[], object] | None = None,
) -> list[Attempt]:
    """Make the calls at once while there is a fault. Who is late has a second try: it is fair."""
    end = end or partial(way.all, FaultProxy.pass_through)
    in_turn = not way.case.claims.shared  # on one handle, where each would wait for the others

    def strike() -> list[Attempt]:
        fault()
        try:
            return (
                [call() for call in calls.values()] if in_turn else side_by_side([*calls.values()])
            )
        finally:
            end()

    made = strike()
    if max(one.elapsed_s for one in made) <= way.limit_s:
        return made
    wait_until(lambda: all(one().error is None for one in calls.values()), PATIENCE_S)
    return [min(pair, key=lambda one: one.elapsed_s) for pair in zip(made, strike(), strict=True)]


def _must_raise(
    way: FaultPath,
    made: Attempt,
    kind: type[Exception] | tuple[type[Exception], ...],
    why: str,
) -> None:
    _must_end(way, made, why)
    if not isinstance(made.error, kind):
        names = [one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,))]
        came = f"raised {type(made.error).__name__}" if made.error else "did not raise"
        raise Violation(
            f"{made.operation} {came} when {why}",
            " or ".join(names),
            made.text,
            way.case.trace.sequence(made.operation),
        )


def _must_end(way: FaultPath, made: Attempt, why: str) -> None:
    """It ended in time, and raised nothing that is foreign."""
    if made.error is not None and not made.failed_by_contract:
        raise foreign(made, way.case.trace.sequence(made.operation))
    if made.elapsed_s > way.limit_s:
        raise Violation(
            f"{made.operation} took too long when {why}",
            f"an end within timeout_s + 1 = {way.timeout_s + 1:g} s",
            f"{made.text} after {made.elapsed_s:.1f} s",
            way.case.trace.sequence(made.operation),
        )


def _cuts(page_nbytes: int) -> Iterator[Callable[[FaultProxy], None]]:
    """Ends of connections, before, in and after the bytes of a page."""
    yield partial(FaultProxy.reset_after, nbytes=0, direction="up")
    for nbytes in (0, 1, 7, page_nbytes // 2, page_nbytes - 1):
        yield partial(FaultProxy.reset_after, nbytes=nbytes, direction="down")
        yield partial(FaultProxy.truncate_after, nbytes=nbytes)


def _bytes_down(way: FaultPath) -> int:
    return sum(proxy.bytes_down for proxy in way.proxies)


def _bytes_held(way: FaultPath) -> int:
    return sum(proxy.held for proxy in way.proxies)
