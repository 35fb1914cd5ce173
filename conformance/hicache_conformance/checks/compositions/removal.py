"""KV-606: pages that are removed from a composition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotDeclared
from hicache_conformance.scenarios.attempts import make_attempt
from hicache_conformance.scenarios.composition import composed
from hicache_conformance.scenarios.fault_path import GRACE_S
from hicache_conformance.scenarios.setup import note
from hicache_conformance.tools.composition.members import Phase, Trouble
from hicache_conformance.tools.processes.resources import wait_until
from hicache_conformance.tools.processes.threads import Threads
from hicache_storage.errors import UnsupportedOperation

if TYPE_CHECKING:
    from hicache_conformance.case.case import Case
    from hicache_conformance.scenarios.attempts import Attempt
    from hicache_conformance.scenarios.composition import Composition

_POSITIONS = range(3)
_UNREACHED = (Trouble.DOWN, Trouble.HUNG, Trouble.READ_ONLY)
_COPIED_WITHIN_S = 0.3
_BLOCKED_AFTER_S = 0.3
_FEW_PAGES = 6
_DELETED = "that was deleted"
_REMOVALS = ("clear", "remove_space")


@check("KV-606")
def a_deleted_page_is_gone_from_every_member(case: Case) -> None:
    """After a delete that was True, no member has the page."""
    with composed(case) as one:
        pages = one.stored()
        one.get(list(pages))
        one.must_be_gone(_gone(list(pages), one.delete(list(pages))), _DELETED)


@check("KV-606")
def a_delete_that_does_not_reach_a_member_is_false(case: Case) -> None:
    """If a member that has a page does not answer a delete, the delete is False, or raises."""
    for trouble in _UNREACHED:
        for position in _POSITIONS:
            with composed(case) as one:
                pages = one.stored()
                member = one.members[position]
                member.fail(trouble)
                with note(f"member {member.name!r} {trouble.value}"):
                    for _ in range(4):
                        gone = _gone(list(pages), one.delete(list(pages)))
                        one.must_be_gone(gone, _DELETED)
                one.mend()
                with note(f"member {member.name!r} {trouble.value} until the delete had ended"):
                    one.must_be_gone(gone, _DELETED)


@check("KV-606")
def a_removed_key_space_is_gone_from_every_member(case: Case) -> None:
    """After `clear` and `remove_space`, no member has a page. If one does not answer, they raise."""
    for operation in _REMOVALS:
        with composed(case) as one:
            pages = one.stored()
            _removed(one, operation)
            one.must_be_gone(list(pages), f"after {operation}")
            case.must_set(one.probe, one.space, pages)
            one.settle()
        for position in _POSITIONS:
            with composed(case) as one:
                pages = one.stored()
                member = one.members[position]
                member.fail(Trouble.DOWN)
                with note(f"member {member.name!r} is down"):
                    if _removed(one, operation).error is None:
                        one.must_be_gone(list(pages), f"after {operation} returned")


@check("KV-606")
def a_delete_reaches_copies_under_way(case: Case) -> None:
    """If a page is deleted while a member stores a copy of it, the copy does not bring it back."""
    copies = 0
    for phase in Phase:
        for position in _POSITIONS:
            for source in ("batch_get", "batch_set"):
                copies += _removed_during_copy(case, position, phase, source, "batch_delete")
    case.evidence["copies that were held"] = f"{copies}"


@check("KV-606")
def a_cleared_key_space_gets_no_copy_that_was_under_way(case: Case) -> None:
    """If a key space is removed while a member stores a copy, the copy does not bring its page back."""
    copies = 0
    for operation in _REMOVALS:
        for position in _POSITIONS:
            for source in ("batch_get", "batch_set"):
                copies += _removed_during_copy(case, position, Phase.BEFORE, source, operation)
    case.evidence["copies that were held"] = f"{copies}"


@check("KV-606")
def a_copy_that_begins_during_a_delete_does_not_stay(case: Case) -> None:
    """If a page is read while a delete is half way, no copy of it is left in a member."""
    for phase in Phase:
        for position in _POSITIONS:
            with composed(case, have_limits=False) as one:
                pages = one.stored(_FEW_PAGES)
                member = one.members[position]
                with note(f"a delete is held in member {member.name!r}, {phase.value}"):
                    with Threads() as threads:
                        with member.holding("batch_delete", phase) as gate:
                            deleting = threads.start(one.caller.delete, list(pages))
                            wait_until(
                                lambda: gate.reached.is_set() or deleting.done,  # noqa: B023 - here
                                _BLOCKED_AFTER_S,
                            )
                            reading = threads.start(one.caller.get, list(pages))
                            reading.wait(_BLOCKED_AFTER_S)
                            wait_until(one.is_copying, _COPIED_WITHIN_S)
                        attempt = deleting.result()
                        reading.result()
                    one.must_be_gone(_gone(list(pages), attempt), _DELETED)


def _removed_during_copy(case: Case, position: int, phase: Phase, source: str, removal: str) -> int:
    """Hold a copy to one member, remove its pages, and let the copy go on. Return 1 if there was one.

    With `batch_get` the member has lost the pages, and gets them again when they are read. With
    `batch_set` it gets them after a set has returned.
    """
    with composed(case, have_limits=False) as one, Threads() as threads:
        member = one.members[position]
        pages = one.stored(_FEW_PAGES) if source == "batch_get" else one.new_pages(_FEW_PAGES)
        hashes = list(pages)
        with member.holding("batch_set", phase) as gate:
            if source == "batch_get":
                member.wipe()
                beginning = threads.start(one.caller.get, hashes)
            else:
                beginning = threads.start(one.caller.set, pages)
            wait_until(lambda: gate.reached.is_set() or beginning.done, one.caller.limit_s)
            beginning.wait(one.caller.limit_s - GRACE_S)
            wait_until(gate.reached.is_set, _COPIED_WITHIN_S)
            if not (gate.reached.is_set() and beginning.done):
                return 0
            removing = threads.start(_remove, one, removal, hashes)
            removing.wait(_BLOCKED_AFTER_S)
        attempt = removing.result()
        with note(f"{removal} while member {member.name!r} stores a copy, {phase.value}"):
            if attempt.error is None:
                gone = _gone(hashes, attempt) if removal == "batch_delete" else hashes
                one.must_be_gone(
                    gone, _DELETED if removal == "batch_delete" else f"after {removal}"
                )
    return 1


def _remove(one: Composition, operation: str, hashes: list[str]) -> Attempt:
    return one.caller.delete(hashes) if operation == "batch_delete" else _removed(one, operation)


def _removed(one: Composition, operation: str) -> Attempt:
    """Remove the key space by `clear` or `remove_space`.

    Raises:
        NotDeclared: The composition has no such call.
    """
    storage, space = one.probe.storage, one.space
    call = (
        (lambda: storage.clear(space))
        if operation == "clear"
        else (lambda: storage.remove_space(space.id))
    )
    attempt = make_attempt(one.probe, operation, call, limit_s=one.caller.limit_s)
    if isinstance(attempt.error, UnsupportedOperation):
        raise NotDeclared(f"the composition has no {operation}")
    return attempt


def _gone(hashes: list[str], attempt: Attempt) -> list[str]:
    """Return the pages for which a delete was True."""
    return [h for h, gone in zip(hashes, attempt.answer or (), strict=False) if gone]
