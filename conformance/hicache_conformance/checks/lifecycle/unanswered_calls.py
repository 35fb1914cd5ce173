"""KV-304, KV-305: a listing without an answer is not empty, and a failed opening works later."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.checks.lifecycle.recovery import must_work_again
from hicache_conformance.rules import Need
from hicache_conformance.scenarios.attempts import Caller, make_attempt
from hicache_conformance.scenarios.fault_path import FaultPath, must_not_be_foreign, open_fault_path
from hicache_conformance.tools.network.proxy import FaultProxy

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_conformance.case.case import Case
    from hicache_conformance.scenarios.attempts import Attempt

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
            must_work_again(elsewhere, caller, f"its key space was opened when {why}")
