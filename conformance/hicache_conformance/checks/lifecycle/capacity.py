"""KV-307: a store that is full by its own count refuses, or evicts, and goes on working."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotDeclared
from hicache_conformance.scenarios.planting import about
from hicache_conformance.scenarios.small_stores import Room, small_room
from hicache_storage.storage import Retention

if TYPE_CHECKING:
    from hicache_conformance.case.case import Case

_PAGES = 16
_EVICTS = "retention is below UNTIL_DELETED: a full store may make room by itself"


@check("KV-307")
def a_full_store_refuses_and_stays_readable(case: Case) -> None:
    """A full store gives False for what has no room, or evicts; what it keeps stays readable."""
    room = small_room(case)
    taken, refused = room.filled()
    case.evidence["pages taken, of those that fit"] = f"{len(taken)} of {room.pages}"
    case.must_miss(room.probe, room.space, list(refused), "was refused: the store was full")
    if not taken:
        raise room.probe.violation("an empty store refused every page")
    if case.keeps:
        room.refused_some(taken, refused)
        case.must_hold(room.probe, room.space, taken)
    else:
        _must_be_bounded(room, taken)


@check("KV-307")
def a_batch_that_does_not_fit_is_judged_page_by_page(case: Case) -> None:
    """Of a batch that is larger than the room, each page has a verdict that is true."""
    room = small_room(case)
    count = min(2 * room.pages + 2, room.probe.max_batch)
    offered = case.contents(room.space, case.hashes(count))
    answers = room.probe.set(room.space, offered)
    taken = {one: offered[one] for one, ok in zip(offered, answers, strict=True) if ok}
    refused = [one for one in offered if one not in taken]
    case.must_miss(room.probe, room.space, refused, "was refused: the store was full")
    if case.keeps:
        case.must_hold(room.probe, room.space, taken)
    else:
        _must_be_bounded(room, taken)


@check("KV-307")
def deleting_makes_room_again(case: Case) -> None:
    """After its pages were deleted, a full store takes as many as at first, again and again."""
    room = small_room(case)
    if not case.keeps:
        raise NotDeclared(_EVICTS)
    first, _ = room.filled()
    for turn in range(2 if case.quick else 3):
        room.probe.delete(room.space, list(first))
        room.probe.delete(room.space, list(first))  # what is gone gives no room twice
        again, refused = room.filled()
        room.refused_some(again, refused)
        _must_be_as_many(room, first, again, f"was filled and emptied {turn + 1} times")
        case.must_hold(room.probe, room.space, again)
        first = again


@check("KV-307")
def setting_a_present_page_takes_no_more_room(case: Case) -> None:
    """Setting present pages, and pages that are refused, leaves the room as it was."""
    room = small_room(case)
    if not case.keeps:
        raise NotDeclared(_EVICTS)
    first, refused = room.filled()
    present = dict(list(first.items())[:2])
    for _ in range(_PAGES):
        room.must_take(present)
        room.probe.set(room.space, dict(list(refused.items())[:2]))
    case.must_hold(room.probe, room.space, first)
    room.probe.delete(room.space, [*first, *refused])
    for _ in range(2 * _PAGES):
        room.must_take(present)
    again, _ = room.filled()
    _must_be_as_many(room, first, {**again, **present}, "had the same pages set often")


@check("KV-307")
def a_page_twice_in_a_batch_takes_room_once(case: Case) -> None:
    """Batches in which each page occurs twice take no more room than their pages, and give it back."""
    if case.claims.retention is Retention.BEST_EFFORT:
        raise NotDeclared("the store may forget pages at any time, not for want of room alone")
    room = small_room(case)
    first = _kept_when_filled(room)
    for _ in range(2 * room.pages):
        (page,) = case.contents(room.space, case.hashes(1)).items()
        room.probe.set_items(room.space, [page, page])
        room.probe.delete(room.space, [page[0]])
    with about("after as many batches of a page twice as would fill it two times"):
        again = _kept_when_filled(room)
    if len(again) < len(first) // 2:  # one that evicts does not keep as many each time
        raise room.probe.violation(
            "a store that was given pages twice in a batch has lost room",
            expected=f"about {len(first)} pages have room, as at first",
            got=f"{len(again)} pages",
        )


def _kept_when_filled(room: Room) -> dict[str, bytes]:
    """What can be read when twice the capacity was offered; all of it is deleted."""
    taken, _ = room.filled()
    found = room.probe.get(room.space, list(taken))
    room.probe.delete(room.space, list(taken))
    return {one: taken[one] for one, data in zip(taken, found, strict=True) if data is not None}


def _must_be_bounded(room: Room, taken: dict[str, bytes]) -> None:
    """Of a store that evicts: no more is there than may be, and all of it is right."""
    case, probe, space = room.case, room.probe, room.space
    found = probe.get(space, list(taken))
    for (page_hash, data), read in zip(taken.items(), found, strict=True):
        if read not in (None, data):
            raise case.wrong_bytes(probe, space, page_hash, read or b"", [data])
    there = sum(read is not None for read in found)
    if there * space.stored_nbytes > 2 * room.capacity_nbytes:
        raise probe.violation(
            f"{there * space.stored_nbytes} bytes are in a store of {room.capacity_nbytes}",
            expected="that it evicts, or refuses",
            got=f"{there} pages of {space.stored_nbytes} bytes can be read",
        )
    probe.delete(space, list(taken))
    if not any(probe.set(space, case.contents(space, case.hashes(8)))):
        raise probe.violation(
            "a store that was full, and whose pages were deleted, takes none",
            expected="True for some of 8 pages: there is room again",
            got="False for each",
        )


def _must_be_as_many(
    room: Room, first: dict[str, bytes], again: dict[str, bytes], why: str
) -> None:
    if len(again) < 0.9 * len(first) - 1:
        raise room.probe.violation(
            f"a store that {why} has lost room",
            expected=f"about {len(first)} pages have room, as at first",
            got=f"{len(again)} pages",
        )
