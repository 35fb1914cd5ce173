"""KV-307: a store that has reached its own limit refuses or evicts pages, and still works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.run.outcomes import NotDeclared, NotVerified
from hicache_conformance.scenarios.setup import note
from hicache_conformance.scenarios.small_stores import SmallStore, small_store
from hicache_storage.backend_support.revocable import AtomicRevocable
from hicache_storage.storage import Retention

if TYPE_CHECKING:
    from hicache_conformance.case.case import Case

_PAGES = 16
_MOST_REFUSED = 256
_LEAST_LEFT = 4
"""The least pages of which a check can tell whether they were evicted."""


@check("KV-307")
def a_full_store_refuses_and_stays_readable(case: Case) -> None:
    """A full store returns False for pages without room, or evicts others. Kept pages stay readable."""
    small = small_store(case)
    taken, refused = small.fill()
    case.evidence["pages taken, of those that fit"] = f"{len(taken)} of {small.pages}"
    case.must_miss(small.probe, small.space, list(refused), "was refused: the store was full")
    if not taken:
        raise small.probe.violation("an empty store refused every page")
    if case.keeps:
        small.must_not_exceed_capacity(taken, refused)
        case.must_hold(small.probe, small.space, taken)
    else:
        _must_be_bounded(small, taken)


@check("KV-307")
def a_batch_that_does_not_fit_is_judged_page_by_page(case: Case) -> None:
    """If a batch is larger than the room that is left, each verdict is true of its page."""
    small = small_store(case)
    count = min(2 * small.pages + 2, small.probe.most_pages(small.space))
    offered = case.contents(small.space, case.hashes(count))
    answers = small.probe.set(small.space, offered)
    taken = {one: offered[one] for one, ok in zip(offered, answers, strict=True) if ok}
    refused = [one for one in offered if one not in taken]
    case.must_miss(small.probe, small.space, refused, "was refused: the store was full")
    if case.keeps:
        case.must_hold(small.probe, small.space, taken)
    else:
        _must_be_bounded(small, taken)


@check("KV-307")
def deleting_makes_room_again(case: Case) -> None:
    """After its pages were deleted, a full store accepts as many as at first, again and again."""
    small = small_store(case)
    small.require_kept()
    first, _ = small.fill()
    for turn in range(2 if case.quick else 3):
        small.probe.delete(small.space, list(first))
        small.probe.delete(small.space, list(first))  # Deleting a page frees its room once.
        again, refused = small.fill()
        small.must_not_exceed_capacity(again, refused)
        small.must_have_room_again(first, again, f"was filled and emptied {turn + 1} times")
        case.must_hold(small.probe, small.space, again)
        first = again


@check("KV-307")
def setting_a_present_page_takes_no_more_room(case: Case) -> None:
    """Setting present pages, or pages that are refused, does not use up any room."""
    small = small_store(case)
    small.require_kept()
    first, refused = small.fill()
    present = dict(list(first.items())[:2])
    for _ in range(_PAGES):
        small.must_accept(present)
        small.probe.set(small.space, dict(list(refused.items())[:2]))
    case.must_hold(small.probe, small.space, first)
    small.probe.delete(small.space, [*first, *refused])
    for _ in range(2 * _PAGES):
        small.must_accept(present)
    again, _ = small.fill()
    small.must_have_room_again(first, {**again, **present}, "had the same pages set often")


@check("KV-307")
def a_page_twice_in_a_batch_takes_room_once(case: Case) -> None:
    """A batch that names each page twice uses room for each page once, and a delete frees it."""
    small = _lasting_store(case)
    first = _kept_when_filled(small)
    for _ in range(2 * small.pages):
        (page,) = case.contents(small.space, case.hashes(1)).items()
        small.probe.set_items(small.space, [page, page])
        small.probe.delete(small.space, [page[0]])
    with note("after enough batches with one page twice to fill the store two times"):
        again = _kept_when_filled(small)
    # A store that evicts does not keep the same number of pages each time.
    if len(again) < len(first) // 2:
        raise small.probe.violation(
            "a store that was given pages twice in a batch has lost room",
            expected=f"about {len(first)} pages have room, as at first",
            got=f"{len(again)} pages",
        )


@check("KV-307")
def deleted_pages_make_room_before_others_go(case: Case) -> None:
    """If half of a full store was deleted, new pages take that room, and the other half stays."""
    small = _lasting_store(case)
    kept = _half_emptied(small)
    _must_have_room(small, kept, "half of a full store was deleted")


@check("KV-307", Need.REVOCABLE)
def sets_of_revoked_pages_take_no_room(case: Case) -> None:
    """If half of a full store was deleted, sets of pages that were revoked leave that room free."""
    small = _lasting_store(case)
    kept = _half_emptied(small)
    memory = small.probe.memory(small.space, 1)
    memory.pages[0].revocable = AtomicRevocable()
    memory.pages[0].revocable.revoke()
    for page_hash in case.hashes(min(2 * small.pages, _MOST_REFUSED)):
        small.probe.storage.batch_set(small.space, [page_hash], memory.pages)
    _must_have_room(small, kept, "pages were refused, and half of a full store deleted before")


def _lasting_store(case: Case) -> SmallStore:
    """Return a small store that loses pages only for lack of room."""
    if case.claims.retention is Retention.BEST_EFFORT:
        raise NotDeclared("the store may forget pages at any time, not only for lack of room")
    return small_store(case)


def _half_emptied(small: SmallStore) -> list[str]:
    """Fill the store, and delete the newer half of its pages. Return the pages that are left."""
    taken, _ = small.fill()
    seen = zip(taken, small.probe.exists(small.space, list(taken)), strict=True)
    there = [page_hash for page_hash, is_there in seen if is_there]
    half = len(there) // 2
    if half < _LEAST_LEFT:
        raise NotVerified(f"the small store keeps {len(there)} pages only")
    small.probe.delete(small.space, there[half:])
    return there[:half]


def _must_have_room(small: SmallStore, kept: list[str], why: str) -> None:
    """Set half as many new pages as have room. Raise if most of them, or as many others, are lost."""
    new = small.case.contents(small.space, small.case.hashes(len(kept) // 2))
    small.probe.set(small.space, new)
    hashes = [*kept, *new]
    lost = small.probe.exists(small.space, hashes).count(False)
    if lost > len(new) // 2:
        raise small.probe.violation(
            f"pages are lost for lack of room, though {why}",
            expected=f"all of the {len(kept)} pages that were left and {len(new)} new ones: at first"
            f" {2 * len(kept)} had room",
            got=f"{lost} of them are gone",
        )


def _kept_when_filled(small: SmallStore) -> dict[str, bytes]:
    """Offer twice the capacity, delete the accepted pages, and return those that could be read."""
    taken, _ = small.fill()
    found = small.probe.get(small.space, list(taken))
    small.probe.delete(small.space, list(taken))
    return {one: taken[one] for one, data in zip(taken, found, strict=True) if data is not None}


def _must_be_bounded(small: SmallStore, taken: dict[str, bytes]) -> None:
    """Raise if a store that evicts holds more than it may, or wrong bytes."""
    case, probe, space = small.case, small.probe, small.space
    found = probe.get(space, list(taken))
    for (page_hash, data), read in zip(taken.items(), found, strict=True):
        if read not in (None, data):
            raise case.wrong_bytes(probe, space, page_hash, read or b"", [data])
    there = sum(read is not None for read in found)
    if there * space.stored_nbytes > 2 * small.capacity_nbytes:
        raise probe.violation(
            f"{there * space.stored_nbytes} bytes are in a store of {small.capacity_nbytes}",
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
