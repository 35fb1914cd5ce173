"""KV-305: when the network or the server is back, the same storage works again, and mixes nothing up."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.run.outcomes import Violation
from hicache_conformance.scenarios.attempts import side_by_side
from hicache_conformance.scenarios.fault_path import (
    PATIENCE_S,
    FaultPath,
    direct_road,
    foreign,
    road,
)
from hicache_conformance.tools.network.proxy import FaultProxy
from hicache_storage.errors import StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_conformance.case.case import Case
    from hicache_conformance.scenarios.attempts import Attempt, Caller

_GOOD_ROUNDS = 2
"""In a row, each over every connection: then none of them is poisoned."""
_CUT_AT_NBYTES = (0, 5, 100, 4000)


@check("KV-305")
def it_works_again_after_a_refusal(case: Case) -> None:
    """After the server refused connections, the same storage works again."""
    with road(case, 4 << 10) as way:
        caller = way.caller()
        _all_at_once(way, caller)
        way.all(FaultProxy.refuse)
        _all_at_once(way, caller, twice=True)
        way.all(FaultProxy.pass_through)
        must_work_again(way, caller, "the server refused connections")


@check("KV-305")
def it_works_again_after_silence(case: Case) -> None:
    """After calls on every connection have timed out, the same storage works again."""
    with road(case, 4 << 10) as way:
        caller = way.caller()
        _all_at_once(way, caller)
        way.all(FaultProxy.go_silent)
        _all_at_once(way, caller, twice=not case.quick)
        way.all(FaultProxy.pass_through)
        must_work_again(way, caller, "its calls timed out")


@check("KV-305", quick=False)
def it_works_again_after_silence_whose_replies_are_lost(case: Case) -> None:
    """The same, where what was sent meanwhile never arrives."""
    with road(case, 4 << 10) as way:
        caller = way.caller()
        _all_at_once(way, caller)
        way.all(FaultProxy.go_silent)
        _all_at_once(way, caller)
        way.all(FaultProxy.drop_held)
        way.all(FaultProxy.pass_through)
        must_work_again(way, caller, "its calls timed out and their replies were lost")


@check("KV-305")
def it_works_again_after_replies_were_cut_short(case: Case) -> None:
    """After connections broke in the middle of replies, the same storage works again."""
    with road(case, 4 << 10) as way:
        caller = way.caller()
        pages = way.planted(caller, 1)
        for nbytes in _CUT_AT_NBYTES:
            for cut in (
                partial(FaultProxy.truncate_after, nbytes=nbytes),
                partial(FaultProxy.reset_after, nbytes=nbytes, direction="down"),
            ):
                way.all(cut)
                _no_foreign(way, caller.get(list(pages)))
                way.all(FaultProxy.pass_through)
        must_work_again(way, caller, "its connections broke in the middle of replies")


@check("KV-305")
def a_late_page_is_not_taken_for_a_later_one(case: Case) -> None:
    """The reply of a get that timed out, when it comes at last, is no other page's."""
    with road(case, 4 << 10) as way:
        caller = way.caller()
        pages = way.planted(caller, 2 if case.quick else 4)
        asked = list(pages)
        for late, later in zip(asked[::2], asked[1::2], strict=True):
            _time_out(way, partial(caller.get, [late]))
            _must_be_right(way, caller, later, pages)
            for page_hash in asked:
                _must_be_right(way, caller, page_hash, pages)


@check("KV-305")
def a_late_verdict_is_not_taken_for_a_later_one(case: Case) -> None:
    """The verdict of an exists or a set that timed out is not taken for the next exists' verdict."""
    with road(case, 4 << 10) as way:
        caller = way.caller()
        ((page_hash, data),) = way.planted(caller, 1).items()
        asked: dict[str, Callable[[], Attempt]] = {
            "batch_exists": lambda: caller.exists([page_hash]),
            "batch_set": lambda: caller.set({page_hash: data}),
        }
        if case.quick:
            del asked["batch_set"]
        for operation, call in asked.items():
            _time_out(way, call)
            for _ in range(2 * way.width):
                (absent,) = case.hashes(1)
                seen = caller.exists([absent])
                _no_foreign(way, seen)
                if seen.answer == [True]:
                    raise caller.probe.violation(
                        f"batch_exists is True for a page that never was, after a {operation} that"
                        " timed out: a late reply was taken for a later one",
                        expected="False, or an exception",
                        got="True",
                    )


@check("KV-305", Need.SERVER)
def it_works_again_after_the_server_was_restarted(case: Case) -> None:
    """After the server was stopped and started, the same storage works again."""
    with case.server() as server:
        way = direct_road(case, dict(case.config))
        caller = way.caller()
        _all_at_once(way, caller)
        server.stop()
        _all_at_once(way, caller)
        server.start()
        must_work_again(way, caller, "the server was stopped and started")
        server.stop()
        server.start()
        must_work_again(way, caller, "the server was restarted between two calls")


@check("KV-305", Need.SERVER, quick=False)
def it_works_again_after_the_server_was_paused(case: Case) -> None:
    """After the server was paused and resumed, the same storage works again."""
    with case.server() as server:
        way = direct_road(case, dict(case.config))
        caller = way.caller()
        _all_at_once(way, caller)
        server.pause()
        _all_at_once(way, caller)
        server.resume()
        must_work_again(way, caller, "the server was paused")


@check("KV-305", quick=False)
def what_did_not_open_opens_when_the_server_is_there(case: Case) -> None:
    """A storage that is opened before its server is there works when it is, or can be opened then."""
    with road(case, 4 << 10) as way:
        way.all(FaultProxy.refuse)
        try:
            early = case.open_storage(way.config)
        except (StorageUnavailable, StorageTimeout):
            early = None
        way.all(FaultProxy.pass_through)
        caller = way.caller() if early is None else way.caller_of(early)
        must_work_again(way, caller, "it was opened without its server")


def _all_at_once(way: FaultPath, caller: Caller, *, twice: bool = False) -> None:
    """As many calls at once as there are connections, of each kind; what comes of them is open."""
    for _ in range(1 + twice):
        pages = way.case.contents(way.space, way.case.hashes(max(way.width, 3)))
        calls: list[Callable[[], Attempt]] = []
        for number, (page_hash, data) in enumerate(pages.items()):
            kinds = (
                partial(caller.get, [page_hash]),
                partial(caller.exists, [page_hash]),
                partial(caller.set, {page_hash: data}),
            )
            calls.append(kinds[number % len(kinds)])
        for made in side_by_side(calls):
            _no_foreign(way, made)


def must_work_again(way: FaultPath, caller: Caller, why: str) -> None:
    """Rounds over every connection, until some in a row are all good."""
    until_s = time.monotonic() + PATIENCE_S
    good, last = 0, ""
    while good < _GOOD_ROUNDS:
        if time.monotonic() > until_s:
            raise Violation(
                f"the storage does not work again after {why}",
                f"calls that succeed within {PATIENCE_S:g} s, on every connection",
                last,
                way.case.trace.sequence(),
            )
        pages = way.case.contents(way.space, way.case.hashes(way.width))
        rounds = [partial(_round, way, caller, {name: data}) for name, data in pages.items()]
        failures = [failure for failure in side_by_side(rounds) if failure]
        good = 0 if failures else good + 1
        last = failures[0] if failures else last
        if failures:
            time.sleep(0.05)  # a breaker is not helped by being asked all the time


def _round(way: FaultPath, caller: Caller, page: Mapping[str, bytes]) -> str:
    """Set, read, see and delete one page; what went wrong, in words."""
    ((page_hash, data),) = page.items()
    steps = (
        (caller.open_space, [None]),
        (partial(caller.set, page), [[True]]),
        (partial(caller.get, [page_hash]), [[data]] if way.case.keeps else [[data], [None]]),
        (partial(caller.exists, [page_hash]), [[True]] if way.case.keeps else [[True], [False]]),
        (partial(caller.delete, [page_hash]), [[True]]),
    )
    for step, right in steps:
        made = step()
        _no_foreign(way, made)
        if made.operation == "batch_get" and made.error is None and made.answer != [None]:
            _must_hold(way, caller, page_hash, made.answer, data)
        if made.error is not None or made.answer not in right:
            return f"{made.operation}: {made.text}"
    return ""


def _time_out(way: FaultPath, call: Callable[[], Attempt]) -> None:
    """Let the request through, hold its reply until the call has given up, and deliver it then."""
    way.all(partial(FaultProxy.go_silent, direction="down"))
    made = call()
    _no_foreign(way, made)
    way.all(FaultProxy.pass_through)
    if not isinstance(made.error, (StorageTimeout, StorageUnavailable)):
        raise Violation(
            f"{made.operation} did not raise though nothing came from the server",
            "StorageTimeout",
            made.text,
            way.case.trace.sequence(made.operation),
        )


def _must_be_right(
    way: FaultPath, caller: Caller, page_hash: str, pages: Mapping[str, bytes]
) -> None:
    made = caller.get([page_hash])
    _no_foreign(way, made)
    if made.error is None and made.answer != [None]:
        _must_hold(way, caller, page_hash, made.answer, pages[page_hash])


def _must_hold(
    way: FaultPath, caller: Caller, page_hash: str, answer: list[bytes], data: bytes
) -> None:
    if answer != [data]:
        raise way.case.wrong_bytes(caller.probe, way.space, page_hash, answer[0], [data])


def _no_foreign(way: FaultPath, made: Attempt) -> None:
    if made.error is not None and not made.failed_by_contract:
        raise foreign(made, way.case.trace.sequence(made.operation))
