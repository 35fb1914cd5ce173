"""KV-001, KV-002, KV-004, KV-005: a page is there if, and only if, it was set."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotDeclared, NotVerified
from hicache_conformance.scenarios.setup import (
    TimeBudget,
    another_handle,
    fitting,
    note,
    open_store,
)
from hicache_storage.errors import install_command
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.storage import Durability

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe

_HASH_LENGTHS = (32, 34, 40, 48, 56, 62, 64, 66, 80, 96, 126, 128)
_MANY = (32, 60, 200, 300, 500)
"""The steps to 1,100 pages."""
_MANY_QUICK = (32, 110)
_ABSENT = 1000
_ABSENT_QUICK = 300
_TOUCHED = "a page that was not in the batch was written into"


# --- KV-001 --------------------------------------------------------------------------------------


@check("KV-001")
def a_fresh_key_space_is_empty(case: Case) -> None:
    """A key space that was never written to has no pages."""
    store, space = open_store(case)
    hashes = [*case.hashes(20), "0" * 64, "f" * 64, "0" * 32, "f" * 128]
    case.must_miss(store, space, hashes, "was never set: its key space is fresh")
    _must_list(case, store, space, [])


@check("KV-001")
def a_new_key_space_of_a_used_store_is_empty(case: Case) -> None:
    """A new key space does not show pages that other key spaces hold under the same hashes."""
    store, used = open_store(case)
    pages = case.stored(store, used, 8)
    for turn, space in enumerate((replace(used, revision="2"), case.space(1, pool="draft"))):
        if turn:
            store.delete(used, list(pages)[:4])
        store.open_space(space)
        case.must_miss(store, space, list(pages), "was set in another key space only")
        _must_list(case, store, space, [])


@check("KV-001")
def a_new_key_space_takes_over_nothing(case: Case) -> None:
    """After a key space was emptied, a new one with the same page size has none of its pages."""
    store, used = open_store(case)
    for revision in ("2", "3") if case.claims.enumerable else ("2",):
        pages = case.stored(store, used, 8)
        if revision == "2":
            store.delete(used, list(pages))
        else:
            store.clear(used)
        fresh = replace(used, revision=revision)
        store.open_space(fresh)
        case.must_miss(store, fresh, list(pages), "was set in a key space that was emptied since")
        _must_list(case, store, fresh, [])


@check("KV-001")
def asking_for_a_page_does_not_make_it(case: Case) -> None:
    """Pages that were looked up, read and deleted, but never set, are still not there."""
    store, space = open_store(case)
    hashes = case.hashes(6)
    for _ in range(2):
        store.exists(space, hashes)
        store.get(space, hashes)
        case.must_miss(store, space, hashes, "was never set, only asked for")
        store.delete(space, hashes)
        case.must_miss(store, space, hashes, "was never set, only asked for and deleted")
    _must_list(case, store, space, [])


@check("KV-001")
def looking_into_a_key_space_does_not_make_it(case: Case) -> None:
    """Reads of a key space that was not opened miss, and do not make `spaces()` list it."""
    store, used = open_store(case)
    pages = case.stored(store, used, 2)
    strange = replace(used, tenant="never opened")
    case.must_miss(store, strange, list(pages), "was set in another key space only")
    store.delete(strange, list(pages))
    if case.claims.enumerable:
        _must_list(case, store, strange, [])
        if strange in store.spaces():
            raise store.violation(
                "spaces() lists a key space that was only read, never opened",
                expected="key spaces that were opened",
                got=f"{strange}",
            )
    case.must_hold(store, used, pages)
    store.open_space(strange)
    with note("its key space was read before it was opened"):
        case.must_hold(store, strange, case.stored(store, strange, 2))


# --- KV-002 --------------------------------------------------------------------------------------


@check("KV-002")
def what_was_set_is_there(case: Case) -> None:
    """After a set returned True, `exists` and `get` find the page, alone and in any batch."""
    store, space = open_store(case)
    for count in (1, 2, 5, 12):
        pages = case.stored(store, space, count)
        case.must_hold(store, space, pages)
        for page_hash in case.random.sample(list(pages), min(count, 4)):
            case.must_hold(store, space, {page_hash: pages[page_hash]})
        case.must_hold(store, space, dict(reversed(pages.items())))


@check("KV-002")
def a_page_shows_after_misses(case: Case) -> None:
    """A page that was missed before is there as soon as it is set."""
    store, space = open_store(case)
    for _ in range(3):
        pages = case.contents(space, case.hashes(4))
        case.must_miss(store, space, list(pages), "was never set")
        store.delete(space, list(pages)[:2])
        store.exists(space, list(pages))
        case.must_set(store, space, pages)
        with note("it was looked up before it was set, and missed"):
            case.must_hold(store, space, pages)


@check("KV-002")
def a_page_stays_while_others_come_and_go(case: Case) -> None:
    """A page stays there while other pages are set, deleted and missed in any key space."""
    store, space = open_store(case)
    other = case.space(fitting(case, 100), pool="draft")
    pages = case.stored(store, space, 3)
    for turn in range(2 if case.quick else 5):
        others = case.stored(store, space, 4)
        pages.update(list(others.items())[:1])
        to_delete = list(others)[1:]
        store.exists(space, case.hashes(3))
        store.delete(space, [*to_delete, *case.hashes(2)])
        with note("other pages were set and deleted meanwhile"):
            case.must_hold(store, space, pages)
        store.open_space(other)
        case.stored(store, other, 2)
        store.delete(other, list(pages))
        if case.claims.enumerable and turn % 2:
            store.clear(other)
        with note("another key space was opened, used and emptied meanwhile"):
            case.must_hold(store, space, pages)


@check("KV-002")
def opening_a_key_space_again_keeps_its_pages(case: Case) -> None:
    """Calling `open_space` again for a key space in use changes nothing."""
    store, space = open_store(case)
    pages: dict[str, bytes] = {}
    for _ in range(3):
        pages.update(case.stored(store, space, 2))
        store.open_space(space)
        store.open_space(replace(space))
        with note("open_space was called again"):
            case.must_hold(store, space, pages)


@check("KV-002")
def equal_key_spaces_are_one(case: Case) -> None:
    """If a key space is built again, or read from its manifest, it holds the same pages."""
    store, space = open_store(case)
    pages = case.stored(store, space, 3)
    read_back = KeySpace.from_manifest(json.loads(json.dumps(space.manifest())))
    for same in (replace(space), read_back, replace(space, model="".join(list(space.model)))):
        with note("it was set and read with equal key spaces that are different objects"):
            case.must_hold(store, same, pages)
            store.open_space(same)
            case.must_hold(store, same, pages)
            pages.update(case.stored(store, same, 1))
            case.must_hold(store, space, pages)


@check("KV-002")
def any_length_of_page_hash_works(case: Case) -> None:
    """Page hashes from 16 to 64 bytes (32 to 128 digits) work."""
    store, space = open_store(case)
    hashes = [case.random.randbytes(length // 2).hex() for length in _HASH_LENGTHS]
    for page_hash in hashes:
        with note(f"its hash has {len(page_hash)} digits"):
            case.must_set(store, space, case.contents(space, [page_hash]))
            case.must_hold(store, space, case.contents(space, [page_hash]))
    case.must_hold(store, space, case.contents(space, hashes))
    store.delete(space, hashes)
    case.must_miss(store, space, hashes, "was deleted")


@check("KV-002")
def pages_in_read_only_memory_can_be_stored(case: Case) -> None:
    """A page can be set from read-only memory."""
    store, space = open_store(case)
    pages = case.contents(space, case.hashes(3))
    for page_hash, data in pages.items():
        memory = store.memory(space, 1).filled_with([data])
        read_only = Page(*(part.toreadonly() for part in memory.pages[0].segments))
        with note("it was set from read-only memory"):
            if store.batch_set(space, [page_hash], [read_only]) != [True]:
                violation = store.violation(
                    "batch_set refused a page", expected="True", got="False"
                )
                raise case.refused(space, violation)
    case.must_hold(store, space, pages)


@check("KV-002")
def many_pages_are_all_there(case: Case) -> None:
    """The first pages are still there, however many have been set since."""
    store, space = open_store(case, 48)
    pages = case.stored(store, space, 8)
    budget = TimeBudget()
    for count in _MANY_QUICK if case.quick else _MANY:
        if budget.allows(count):
            with budget.measured(count):
                pages.update(case.stored(store, space, count))
    case.evidence["pages"] = str(len(pages))
    with note(f"{len(pages)} pages were set in all"):
        case.must_hold(store, space, pages)


@check("KV-002")
def pages_outlive_an_orderly_close(case: Case) -> None:
    """If pages outlive their handle, a page that was set before close is there for the next handle."""
    if case.claims.durability < Durability.CRASH:
        raise NotDeclared("the store does not claim durability CRASH or more")
    store, space = open_store(case)
    pages: dict[str, bytes] = {}
    deleted: list[str] = []
    for count in (1, 6, 4):
        pages.update(case.stored(store, space, count))
        to_delete = case.stored(store, space, 1)
        store.delete(space, list(to_delete))
        deleted += to_delete
        pages.update(case.stored(store, space, 1))
        store.close()
        store = case.open()
        store.open_space(space)
        with note("it was set before close, and read by the next handle"):
            case.must_hold(store, space, pages)
        case.must_miss(store, space, deleted, "was deleted before close")


# --- KV-004 --------------------------------------------------------------------------------------


@check("KV-004")
def a_miss_is_false(case: Case) -> None:
    """Pages that were never set are misses, however many there are and whatever else is stored."""
    store, space = open_store(case)
    case.stored(store, space, 20)
    budget = TimeBudget()
    for count in (1, 2, 100, _ABSENT_QUICK if case.quick else _ABSENT):
        if not budget.allows(count):
            break
        case.evidence["absent pages looked up"] = str(count)
        with budget.measured(count):
            case.must_miss(store, space, case.hashes(count), "was never set")


@check("KV-004")
def a_miss_is_false_for_every_reason(case: Case) -> None:
    """Pages that were deleted, cleared or set only elsewhere are misses, like pages never set."""
    store, space = open_store(case)
    other = case.space(fitting(case, 512), pool="draft")
    store.open_space(other)
    elsewhere = list(case.stored(store, other, 2))
    deleted = list(case.stored(store, space, 3))
    store.delete(space, deleted)
    never = case.hashes(2)
    for page_hash in (*deleted, *elsewhere, *never):
        case.must_miss(store, space, [page_hash], "is not there")
    case.must_miss(store, space, [*never, *deleted, *elsewhere], "is not there")
    if case.claims.enumerable:
        cleared = list(case.stored(store, space, 2))
        store.clear(space)
        case.must_miss(store, space, cleared, "was cleared")


@check("KV-004")
def a_batch_writes_into_its_own_pages_only(case: Case) -> None:
    """A get writes only into the pages of its batch, not into the memory between or around them."""
    store, space = open_store(case, 1000)
    pages = case.stored(store, space, 6)
    there, absent = list(pages), case.hashes(6)
    mixed = [page_hash for pair in zip(absent, there, strict=True) for page_hash in pair]
    for segments in (1, 2, 7):
        for hashes in (there, absent, mixed, mixed[::-1], absent[:1]):
            _must_leave_other_pages(store, space, hashes, segments)


def _must_leave_other_pages(
    store: Probe, space: KeySpace, hashes: Sequence[str], segments: int
) -> None:
    """Read into every second page of a piece of memory. The pages in between must not change."""
    memory = store.memory(space, 2 * len(hashes) + 1, segments)
    given, between = memory.pages[1::2], memory.pages[::2]
    untouched = between[0].tobytes()
    step = store.most_pages(space)
    for start in range(0, len(hashes), step):
        store.batch_get(space, hashes[start : start + step], given[start : start + step])
    overrun = memory.overrun()
    if overrun or any(page.tobytes() != untouched for page in between):
        raise store.violation(
            f"batch_get wrote outside the pages that it was given, of {segments} segments",
            expected="no byte outside the pages of the batch changes",
            got=overrun or _TOUCHED,
        )


# --- KV-005 --------------------------------------------------------------------------------------


@check("KV-005")
def a_present_page_can_be_set_again(case: Case) -> None:
    """Setting a page that is there returns True, and the page stays readable."""
    store, space = open_store(case)
    pages = case.stored(store, space, 4)
    for count in (1, 4, 2, 4):
        again = dict(list(pages.items())[:count])
        with note("it was there already, with the same bytes"):
            case.must_set(store, space, again)
            case.must_hold(store, space, pages)


@check("KV-005")
def other_bytes_leave_a_page_whole(case: Case) -> None:
    """A page that is set again holds all old or all new bytes, and other pages do not change."""
    store = case.open()
    for nbytes in (3, 1000, 9000, 300_001):
        space = case.space(fitting(case, nbytes))
        store.open_space(space)
        kept = case.stored(store, space, 2)
        hashes = case.hashes(2)
        versions: dict[str, list[bytes]] = {page_hash: [] for page_hash in hashes}
        for version in range(4):
            new = case.contents(space, hashes, version)
            for page_hash, data in new.items():
                versions[page_hash].append(data)
            with note(f"it was set {version + 1} times, each time with other bytes"):
                case.must_set(store, space, new)
                case.must_hold(store, space, versions)
                case.must_hold(store, space, kept)
        store.delete(space, [*hashes, *kept])


@check("KV-005")
def another_handle_can_set_a_page_again(case: Case) -> None:
    """One handle can set a page again that another handle has set, and the page stays whole."""
    store, space = open_store(case)
    pages = case.stored(store, space, 3)
    again = another_handle(case, store)
    again.open_space(space)
    case.stored(again, space, 1)
    for version in (0, 1):
        new = case.contents(space, list(pages), version)
        with note("another handle had set it before"):
            case.must_set(again, space, new)
            case.must_hold(again, space, {h: [pages[h], new[h]] for h in pages})


def _must_list(case: Case, store: Probe, space: KeySpace, hashes: Sequence[str]) -> None:
    """Raise unless the store lists exactly these pages. A store without listings passes."""
    listed = [info.page_hash for info in store.scan(space)] if case.claims.enumerable else hashes
    if sorted(listed) != sorted(hashes):
        raise store.violation(
            "scan lists pages that are not there",
            expected=f"{len(hashes)} pages",
            got=f"{len(listed)}: {', '.join(one[:8] for one in listed[:3])}",
        )


@check("KV-002")
def any_sequence_of_calls_agrees_with_a_dict(case: Case) -> None:
    """After any short sequence of calls, on any handle, the store holds what a dict would hold."""
    try:
        from hicache_conformance.scenarios.sequence_search import SequenceSearch  # noqa: PLC0415 - the kit works without hypothesis
    except ImportError as error:
        if error.name != "hypothesis":
            raise
        raise NotVerified(f"needs hypothesis: {install_command('conformance')}") from None
    search = SequenceSearch(case, limit_s=1.5 if case.quick else 10.0)
    search.run(20 if case.quick else 80)
    case.evidence["sequences"] = str(search.sequences)
