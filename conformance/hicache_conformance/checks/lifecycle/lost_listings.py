"""KV-304, KV-305: what no answer came for is not empty, and what failed meanwhile works later."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.checks.lifecycle.recovery import must_work_again
from hicache_conformance.rules import Need
from hicache_conformance.scenarios.attempts import Caller, attempted
from hicache_conformance.scenarios.fault_path import FaultPath, foreign, road
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
    """Scan, spaces and clear raise when the server does not answer: they do not say "nothing"."""
    with road(case, 64) as way:
        for why, fault in _FAULTS.items():
            for operation in ("scan", "spaces", "clear"):
                caller = way.caller(operation)
                pages = way.planted(caller, 3)
                way.all(fault)
                made = _listed(way, caller, operation)
                way.all(FaultProxy.pass_through)
                if made.error is not None:
                    continue  # what it raised is for other checks
                there: list[bool] = way.in_time(partial(caller.exists, list(pages)))
                right = {
                    "scan": set(pages) <= set(made.answer),
                    "spaces": way.space.id in made.answer,
                    "clear": not any(there),
                }
                if not right[operation] and (case.keeps or all(there)):
                    raise caller.probe.violation(
                        f"{operation} answers when {why}, and its answer is wrong",
                        expected="StorageUnavailable or StorageTimeout: nobody has said that there is"
                        " nothing",
                        got=f"{made.text}; there are {sum(there)} pages",
                        sequence=case.trace.sequence(operation),
                    )
                way.in_time(partial(caller.delete, list(pages)))


def _listed(way: FaultPath, caller: Caller, operation: str) -> Attempt:
    storage, space = caller.probe.storage, way.space
    calls: dict[str, Callable[[], object]] = {
        "scan": lambda: [info.page_hash for info in storage.scan(space)],
        "spaces": lambda: [one.id for one in storage.spaces()],
        "clear": lambda: storage.clear(space),
    }
    return attempted(caller.probe, operation, calls[operation], limit_s=caller.limit_s)


@check("KV-305")
def a_key_space_that_was_opened_in_vain_works_later(case: Case) -> None:
    """A key space that was opened, or first used, while the server was away works when it is back."""
    with road(case, 4 << 10) as way:
        first = way.caller()
        for why, fault in _FAULTS.items():
            elsewhere = replace(way, space=replace(way.space, tenant=f"opened when {why}"))
            caller = Caller(first.probe, elsewhere.space, first.limit_s)
            pages = case.contents(elsewhere.space, case.hashes(1))
            way.all(fault)
            for made in (caller.open_space(), caller.exists(list(pages)), caller.set(pages)):
                if made.error is not None and not made.failed_by_contract:
                    raise foreign(made, case.trace.sequence(made.operation))
            way.all(FaultProxy.pass_through)
            must_work_again(elsewhere, caller, f"its key space was opened when {why}")
