"""KV-007: a page that was deleted is gone, and can be set again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotDeclared
from hicache_conformance.scenarios.edge_cases import similar_hashes
from hicache_conformance.scenarios.setup import TimeBudget, another_handle, note, open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_SETTLED_AFTER_S = 0.3


@check("KV-007")
def a_deleted_page_is_gone(case: Case) -> None:
    """After a delete, `exists` and `get` no longer find the page, and still find all others."""
    store, space = open_store(case, 768)
    for places in ((0,), (4,), (2,), (0, 2, 4), (1, 2), (0, 1, 2, 3, 4)):
        pages = case.stored(store, space, 5)
        case.must_hold(store, space, pages)  # The reads fill the store's cache, if it has one.
        to_delete = [list(pages)[place] for place in places]
        _must_delete(store, space, to_delete)
        case.must_miss(store, space, to_delete, "was deleted")
        with note("others of its batch were deleted"):
            case.must_hold(store, space, {h: d for h, d in pages.items() if h not in to_delete})


@check("KV-007")
def deleting_an_absent_page_is_true(case: Case) -> None:
    """A delete of a page that is not there returns True, because the page is gone."""
    store, space = open_store(case, 768)
    _must_delete(store, space, case.hashes(1))
    _must_delete(store, space, case.hashes(3))
    pages = case.stored(store, space, 3)
    mixed = [h for pair in zip(pages, case.hashes(3), strict=True) for h in pair]
    for _ in range(3):
        _must_delete(store, space, mixed)
    for page_hash in pages:
        _must_delete(store, space, [page_hash])
    case.must_miss(store, space, mixed, "was deleted")


@check("KV-007")
def a_deleted_page_can_be_set_again(case: Case) -> None:
    """After set, delete and set, the page is there with the bytes of the last set."""
    store, space = open_store(case, 768)
    hashes = case.hashes(3)
    for version in range(3 if case.quick else 6):
        pages = case.contents(space, hashes, version)
        with note(f"it was set and deleted {version} times before"):
            case.must_set(store, space, pages)
            case.must_hold(store, space, pages)
        _must_delete(store, space, hashes)
        case.must_miss(store, space, hashes, "was deleted")


@check("KV-007")
def one_delete_is_enough(case: Case) -> None:
    """A page that was set several times is gone after one delete."""
    store, space = open_store(case, 768)
    hashes = case.hashes(2)
    for version in (0, 0, 1, 2):
        case.must_set(store, space, case.contents(space, hashes, version))
    _must_delete(store, space, hashes)
    case.must_miss(store, space, hashes, "was deleted; it had been set four times")


@check("KV-007")
def a_page_with_the_same_bytes_stays(case: Case) -> None:
    """If several pages hold the same bytes, deleting one leaves the others."""
    store, space = open_store(case, 768)
    data = case.random.randbytes(space.stored_nbytes)
    pages = dict.fromkeys(case.hashes(3), data)
    case.must_set(store, space, pages)
    left = dict(pages)
    for page_hash in pages:
        _must_delete(store, space, [page_hash])
        left.pop(page_hash)
        case.must_miss(store, space, [page_hash], "was deleted")
        with note("a page with the same bytes was deleted"):
            case.must_hold(store, space, left)


@check("KV-007")
def deleting_spares_hashes_that_are_alike(case: Case) -> None:
    """Deleting a page leaves pages whose hashes share digits with its hash."""
    store, space = open_store(case, 64)
    budget = TimeBudget()
    for description, similar in similar_hashes(case.random).items():
        hashes = budget.shortened(similar)
        with budget.measured(len(hashes)):
            pages = case.contents(space, hashes)
            case.must_set(store, space, pages)
            for page_hash in (hashes[0], hashes[-1]):
                _must_delete(store, space, [page_hash])
                pages.pop(page_hash)
                case.must_miss(store, space, [page_hash], "was deleted")
                with note(f"a page was deleted whose hash is similar: {description}"):
                    case.must_hold(store, space, pages)
            store.delete(space, hashes)


@check("KV-007")
def what_is_done_later_brings_no_deleted_page_back(case: Case) -> None:
    """A deleted page stays gone after sets of other pages, more deletes and another `open_space`."""
    store, space = open_store(case, 768)
    pages = case.stored(store, space, 6)
    deleted = list(pages)[1::2]
    left = {page_hash: data for page_hash, data in pages.items() if page_hash not in deleted}
    _must_delete(store, space, deleted)
    for _ in range(3):
        left.update(case.stored(store, space, 2))
        store.get(space, deleted)
        store.open_space(space)
        store.delete(space, case.hashes(1))
        case.must_miss(store, space, deleted, "was deleted, before others were set")
        with note("others were deleted and set"):
            case.must_hold(store, space, left)


@check("KV-007")
def a_page_deleted_twice_leaves_room_for_one(case: Case) -> None:
    """After pages were deleted twice, each newly set page has a place of its own."""
    store, space = open_store(case, 768)
    kept = case.stored(store, space, 2)
    for twice in (False, True):
        deleted = list(case.stored(store, space, 3))
        for _ in range(2):
            store.delete(space, deleted)
        if twice:
            store.delete(space, [*deleted, *deleted])
        kept.update(case.stored(store, space, 1))
        kept.update(case.stored(store, space, 6))
        with note("it was set after other pages had been deleted twice"):
            case.must_hold(store, space, kept)
        case.must_miss(store, space, deleted, "was deleted twice")


@check("KV-007")
def deleting_many_spares_the_rest(case: Case) -> None:
    """After many deletes, in batches and one by one, the remaining pages have not changed."""
    store, space = open_store(case, 100)
    pages = case.stored(store, space, 8)
    budget = TimeBudget(1.0)
    for count in (32,) if case.quick else (32, 64, 196):
        if budget.allows(count):
            with budget.measured(count):
                pages.update(case.stored(store, space, count))
    to_delete = case.random.sample(list(pages), 2 * len(pages) // 3)
    alone = to_delete[: len(to_delete) // 8]
    for page_hash in alone:
        _must_delete(store, space, [page_hash])
    _must_delete(store, space, to_delete[len(alone) :])
    left = {page_hash: data for page_hash, data in pages.items() if page_hash not in set(to_delete)}
    with note(f"{len(to_delete)} of {len(pages)} pages were deleted"):
        case.must_hold(store, space, left)
    case.must_miss(store, space, to_delete, "was deleted with many others")
    again = case.contents(space, to_delete, 1)
    case.must_set(store, space, again)
    with note(f"{len(to_delete)} of {len(pages)} pages were deleted and set again"):
        case.must_hold(store, space, {**left, **again})


@check("KV-007")
def sets_and_deletes_take_effect_in_order(case: Case) -> None:
    """If sets and deletes of a page follow quickly, the last one counts, now and a moment later."""
    store, space = open_store(case, 768)
    dead, alive, both = case.hashes(3), case.hashes(3), case.hashes(3)
    old, new = (case.contents(space, both, version) for version in (0, 1))
    pages = {**case.contents(space, alive), **new}
    for page_hash in dead:
        case.must_set(store, space, case.contents(space, [page_hash]))
        _must_delete(store, space, [page_hash])
    for page_hash in alive:
        _must_delete(store, space, [page_hash])
        case.must_set(store, space, {page_hash: pages[page_hash]})
    for page_hash in both:
        case.must_set(store, space, {page_hash: old[page_hash]})
        _must_delete(store, space, [page_hash])
        case.must_set(store, space, {page_hash: new[page_hash]})
    for wait_s in (0.0, _SETTLED_AFTER_S / 4, _SETTLED_AFTER_S):
        time.sleep(wait_s)  # The store may still work in the background.
        case.must_miss(store, space, dead, "was deleted right after it was set")
        with note("it was set right after it was deleted"):
            case.must_hold(store, space, pages)


@check("KV-007")
def another_handle_sees_no_deleted_page(case: Case) -> None:
    """A page that was deleted is also gone for the next handle."""
    store, space = open_store(case, 768)
    pages = case.stored(store, space, 4)
    deleted = list(pages)[::2]
    case.must_hold(store, space, pages)
    _must_delete(store, space, deleted)
    again = another_handle(case, store)
    again.open_space(space)
    case.must_miss(again, space, deleted, "was deleted through an earlier handle")
    left = {page_hash: data for page_hash, data in pages.items() if page_hash not in deleted}
    with note("others were deleted through an earlier handle"):
        case.must_hold(again, space, left)


@check("KV-007")
def a_delete_through_another_handle_counts(case: Case) -> None:
    """If one handle deletes a page, the page is gone for another handle that has just read it."""
    if not case.claims.shared:
        raise NotDeclared("the store does not claim shared")
    store, space = open_store(case, 768)
    other = case.open()
    other.open_space(space)
    for one, two in ((store, other), (other, store)):
        pages = case.stored(one, space, 3)
        case.must_hold(one, space, pages)
        case.must_hold(two, space, pages)
        deleted = list(pages)[:2]
        _must_delete(two, space, deleted)
        case.must_miss(one, space, deleted, "was deleted through another handle")
        fresh = case.contents(space, deleted, 1)
        case.must_set(two, space, fresh)
        with note("another handle deleted it, and set it again with other bytes"):
            case.must_hold(one, space, fresh)


def _must_delete(store: Probe, space: KeySpace, hashes: Sequence[str]) -> None:
    """Delete pages. Every verdict must be True."""
    for page_hash, deleted in zip(hashes, store.delete(space, hashes), strict=True):
        if not deleted:
            raise store.violation(
                "batch_delete is False although nothing prevents the deletion",
                expected="True, whether the page was there or not",
                got=f"False for {page_hash[:8]}",
                sequence=store.trace.sequence(page_hash[:8]),
            )
