"""Calls without an answer: a listing is not empty, a failed opening works later, a set stays away."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.checks.lifecycle.recovery import must_work_again
from hicache_conformance.rules import Need
from hicache_conformance.run.outcomes import NotDeclared, NotVerified
from hicache_conformance.scenarios.attempts import Caller, make_attempt
from hicache_conformance.scenarios.fault_path import FaultPath, must_not_be_foreign, open_fault_path
from hicache_conformance.tools.network.proxy import FaultProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_conformance.case.case import Case
    from hicache_conformance.scenarios.attempts import Attempt

_WATCHED_S = 1.5
"""How long a deleted page must stay away: longer than the time limit of a call that tries again."""
_POLL_S = 0.05
_MOST_REQUESTS = 4
"""A set that sends more requests than these is tried with the first ones only."""
_LATE_REQUEST_S = 0.3
_FAULTS: dict[str, Callable[[FaultProxy], object]] = {
    "the server never answers": FaultProxy.go_silent,
    "the server refuses connections": FaultProxy.refuse,
}


@check("KV-304", Need.ENUMERABLE)
def a_listing_that_never_came_is_no_empty_one(case: Case) -> None:
    """If the server does not answer, scan, spaces and clear raise, and do not return an empty answer."""
    with open_fault_path(case, 64) as path:
        for why, fault in _FAULTS.items():
            for operation in ("scan", "spaces", "clear"):
                caller = path.caller(operation)
                pages = path.stored_pages(caller, 3)
                path.on_all(fault)
                attempt = _listed(path, caller, operation)
                path.on_all(FaultProxy.pass_through)
                if attempt.error is not None:
                    continue  # Other checks judge the exception.
                there: list[bool] = path.answer_of(partial(caller.exists, list(pages)))
                right = {
                    "scan": set(pages) <= set(attempt.answer),
                    "spaces": path.space.id in attempt.answer,
                    "clear": not any(there),
                }
                if not right[operation] and (case.keeps or all(there)):
                    raise caller.probe.violation(
                        f"{operation} answers when {why}, but its answer is wrong",
                        expected="StorageUnavailable or StorageTimeout: no server said that the page"
                        " is absent",
                        got=f"{attempt.text}; there are {sum(there)} pages",
                        sequence=case.trace.sequence(operation),
                    )
                path.answer_of(partial(caller.delete, list(pages)))


def _listed(path: FaultPath, caller: Caller, operation: str) -> Attempt:
    storage, space = caller.probe.storage, path.space
    calls: dict[str, Callable[[], object]] = {
        "scan": lambda: [info.page_hash for info in storage.scan(space)],
        "spaces": lambda: [one.id for one in storage.spaces()],
        "clear": lambda: storage.clear(space),
    }
    return make_attempt(caller.probe, operation, calls[operation], limit_s=caller.limit_s)


@check("KV-305")
def a_key_space_that_was_opened_in_vain_works_later(case: Case) -> None:
    """A key space that was opened or first used while the server was away works once it is back."""
    with open_fault_path(case, 4 << 10) as path:
        first = path.caller()
        for why, fault in _FAULTS.items():
            elsewhere = replace(path, space=replace(path.space, tenant=f"opened when {why}"))
            caller = Caller(first.probe, elsewhere.space, first.limit_s)
            pages = case.contents(elsewhere.space, case.hashes(1))
            path.on_all(fault)
            for attempt in (caller.open_space(), caller.exists(list(pages)), caller.set(pages)):
                must_not_be_foreign(path, attempt)
            path.on_all(FaultProxy.pass_through)
            reason = f"its key space was opened when {why}"
            must_work_again(elsewhere, caller, reason, is_open=False)


@check("KV-007")
def a_set_that_timed_out_brings_no_deleted_page_back(case: Case) -> None:
    """If a set has timed out and its page was deleted since, no later call stores the page."""
    with open_fault_path(case, 4 << 10) as path:
        caller = path.caller()
        path.stored_pages(caller, 1)
        late = case.contents(path.space, case.hashes(1))
        path.on_all(FaultProxy.go_silent)
        must_not_be_foreign(path, caller.set(late))
        path.on_all(FaultProxy.drop_held)  # what has not arrived by now never will
        path.on_all(FaultProxy.pass_through)
        if path.answer_of(partial(caller.delete, list(late))) != [True]:
            raise NotVerified("the store could not delete the page of a set that had timed out")
        others = case.contents(path.space, case.hashes(1))
        until_s = time.monotonic() + _WATCHED_S
        for call in (
            partial(caller.exists, list(late)),
            partial(caller.set, others),
            partial(caller.get, list(others)),
            partial(caller.delete, list(others)),
        ):
            path.answer_of(call)
            _must_be_gone(path, caller, late)
        while time.monotonic() < until_s:  # a thread of the store may try again
            time.sleep(_POLL_S)
            _must_be_gone(path, caller, late)


@check("KV-006")
def a_refused_page_whose_request_comes_late_never_shows(case: Case) -> None:
    """If a set is False because its connection ended, its page stays away when its request arrives."""
    with open_fault_path(case, 1 << 10) as path:
        caller = path.caller()
        path.stored_pages(caller, 1)
        refused = 0
        for requests in range(_MOST_REQUESTS):
            late = case.contents(path.space, case.hashes(1))
            path.on_all(partial(FaultProxy.deliver_late_after, requests=requests))
            attempt = caller.set(late)
            path.on_all(FaultProxy.pass_through)
            must_not_be_foreign(path, attempt)
            if attempt.answer != [False]:
                continue
            refused += 1
            until_s = time.monotonic() + _LATE_REQUEST_S
            while time.monotonic() < until_s:
                if path.answer_of(partial(caller.exists, list(late))) != [False]:
                    raise caller.probe.violation(
                        "a page is there although its batch_set returned False",
                        expected="a miss: its request came after its connection had ended",
                        got="a hit",
                        sequence=case.trace.sequence("batch_set"),
                    )
                time.sleep(_POLL_S)
        if not refused:
            raise NotDeclared("no set returned False when its connection ended")


def _must_be_gone(path: FaultPath, caller: Caller, pages: Mapping[str, bytes]) -> None:
    there = path.answer_of(partial(caller.exists, list(pages)))
    found = path.answer_of(partial(caller.get, list(pages)))
    if any(there) or any(data is not None for data in found):
        raise caller.probe.violation(
            "a page is there again that was deleted after its set had timed out",
            expected="a miss: batch_delete returned True, and nobody has set the page since",
            got=f"batch_exists {there}",
        )
