"""KV-306: after a fork with an open store, the child works or is refused, and the parent still works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.checks.lifecycle.configs import accepts
from hicache_conformance.run.outcomes import Violation
from hicache_conformance.scenarios.forks import ClosesFirst, Report, fork_and_use
from hicache_conformance.scenarios.lifecycle_actors import receive_result
from hicache_conformance.scenarios.setup import fitting, note
from hicache_storage.storage import Durability

if TYPE_CHECKING:
    from hicache_conformance.case.case import Case
    from hicache_storage.keys import KeySpace

_PAGE_NBYTES = 16 << 10
_TIMEOUT_S = 5.0
_STORM_S = 2.0
_STORM_QUICK_S = 0.2


@check("KV-306")
def a_forked_child_works_or_is_refused(case: Case) -> None:
    """A child forked with an open storage can use the storage or is refused, and can close it."""
    _fork(case, ClosesFirst.CHILD)


@check("KV-306")
def a_forked_child_goes_on_when_its_parent_closes(case: Case) -> None:
    """A page that a forked child stores is there, even if its parent closed the storage before."""
    _fork(case, ClosesFirst.PARENT)


def _fork(case: Case, first: ClosesFirst) -> None:
    if accepts(case, {"timeout_s": _TIMEOUT_S}):
        case.reconfigure(timeout_s=_TIMEOUT_S)
    space = case.space(fitting(case, _PAGE_NBYTES))
    kept = case.contents(space, case.hashes(3))
    child = case.child(fork_and_use, space, kept, first, _STORM_QUICK_S if case.quick else _STORM_S)
    child_report, parent_report = receive_result(child)
    case.evidence["calls in the forked child"] = (
        f"{child_report.calls}, {child_report.refusals} refused"
    )
    for side, report in (
        ("a forked child", child_report),
        ("the parent of a forked child", parent_report),
    ):
        case.trace.stored[space].update(report.taken)
        if report.problem:
            raise Violation(
                f"{side} that goes on with the handle: {report.problem}",
                "right answers, or a refusal such as StorageClosed: compare os.getpid() with that of"
                " the process that opened it",
                report.problem,
                (
                    "open, set 3 pages",
                    "fork",
                    "both: batch_set, batch_get, batch_exists",
                    _close_order(first),
                ),
            )
    if parent_report.refusals:
        raise Violation(
            "the parent of a forked child can't go on",
            "a parent that works as if it had not forked",
            f"{parent_report.refusals} of its {parent_report.calls} calls raised",
        )
    child.wait()
    _must_be_there(case, space, kept, parent_report, child_report)


def _must_be_there(case: Case, space: KeySpace, kept: dict[str, bytes], *reports: Report) -> None:
    """Raise if a store that outlives its processes lacks a page that one of them has set.

    A shared store may still keep a page in the memory of the process that set it.
    """
    if case.claims.durability < Durability.CRASH:
        return
    store = case.open(label="opened afterwards")
    store.open_space(space)
    with note("it was set by a process that forked, or by its child"):
        case.must_hold(store, space, kept)
        for report in reports:
            case.must_hold(store, space, report.taken)


def _close_order(first: ClosesFirst) -> str:
    return f"{first.value} closes, the other goes on"
