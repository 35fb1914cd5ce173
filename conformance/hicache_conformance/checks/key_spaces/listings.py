"""KV-104: scan lists exactly the pages that are there."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import closing
from functools import partial
from itertools import islice, zip_longest
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.scenarios.attempts import call_at_once
from hicache_conformance.scenarios.fault_path import open_fault_path
from hicache_conformance.scenarios.key_space_neighbours import similar_ids
from hicache_conformance.scenarios.setup import (
    TimeBudget,
    fitting,
    note,
    open_and_set,
    open_store,
    store_many,
)
from hicache_conformance.scenarios.small_stores import small_store
from hicache_conformance.tools.network.proxy import FaultProxy
from hicache_conformance.tools.processes.threads import Threads, held_set

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_conformance.scenarios.fault_path import FaultPath
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import PageInfo

_AGAIN = 100
_ALIKE_PAGES = 1100
_ALIKE_PAGES_QUICK = 600
_ALIKE_DIGITS = 16
_ALIKE_STEP = 100
_ALIKE_S = 1.0
"""For how long pages are set, so that a slow store sets fewer."""
_RACED_PAGES = 64
_RACED_S = 4.0
_RACED_S_QUICK = 0.5
_LOST_PAGES = 128
_LATE_S = 0.01
"""How late the bytes of a listing come, so that pages are set between any two of its steps."""
_LISTINGS = 5
_LISTINGS_QUICK = 2
_LACKING_NBYTES = (1, 60, 180, 500)
"""How many bytes before the end of a set its writer is cut off."""
_CALL_LIMIT_S = 10.0
"""How long a call may wait for a listing that its reader has paused."""


@check("KV-104")
def scan_lists_every_page_once_with_its_size(case: Case) -> None:
    """Scan lists each page once, with the number of bytes stored for it, frame included."""
    store = case.open()
    for count, nbytes, frame_nbytes in ((0, 64, 0), (1, 1, 0), (2, 333, 0), (37, 192, 64)):
        whole = fitting(case, nbytes + frame_nbytes)
        frame = min(frame_nbytes, whole - 1)
        space = case.space(whole - frame, frame_nbytes=frame, tenant=f"{count} pages")
        store.open_space(space)
        pages = case.stored(store, space, count)
        must_list(case, store, space, pages)


@check("KV-104")
def scan_lists_hashes_of_every_length(case: Case) -> None:
    """Scan lists page hashes of 16 to 64 bytes as they were set."""
    store, space = open_store(case, 64)
    digits = "".join(case.hashes(2))
    hashes = [digits[:length] for length in (32, 34, 40, 64, 66, 96, 126, 128)]
    open_and_set(case, store, space, *hashes)
    must_list(case, store, space, hashes)


@check("KV-104")
def scan_follows_every_change(case: Case) -> None:
    """After every change, scan lists no deleted page, no page twice, and none of other key spaces."""
    store = case.open()
    space = case.space(fitting(case, 100))
    others = [
        case.space(space.page_nbytes, pool="draft"),
        case.space((space.page_nbytes + 1) // 2, revision="half"),
        case.space(space.page_nbytes, model=f"{space.model}2"),
        *(other for _, _, other in similar_ids(space, 4)),
    ]
    hashes = case.hashes(12)
    open_and_set(case, store, space, *hashes)
    for other in others:
        open_and_set(case, store, other, *case.hashes(3), *hashes[:2])
    open_and_set(case, store, space, *hashes[:6])
    with note("after some pages were set again"):
        must_list(case, store, space, hashes)
    store.delete(space, hashes[3:9])
    with note("after some pages were deleted"):
        must_list(case, store, space, hashes[:3] + hashes[9:])
    open_and_set(case, store, space, *hashes[4:6])
    with note("after deleted pages were set again"):
        must_list(case, store, space, hashes[:3] + hashes[4:6] + hashes[9:])
    store.delete(space, hashes)
    with note("after all pages were deleted"):
        must_list(case, store, space, [])
    store.clear(space)
    open_and_set(case, store, space, *hashes[:2])
    with note("after the key space was cleared and two pages set"):
        must_list(case, store, space, hashes[:2])


@check("KV-104")
def pages_whose_hashes_begin_alike_are_listed(case: Case) -> None:
    """Scan lists every page, even if the hashes of many hundreds begin with the same digits."""
    store, space = open_store(case, 64)
    head = case.hashes(1)[0][:_ALIKE_DIGITS]
    most = _ALIKE_PAGES_QUICK if case.quick else _ALIKE_PAGES
    hashes = [head + one[_ALIKE_DIGITS:] for one in case.hashes(most)]
    budget = TimeBudget(_ALIKE_S)
    count = 0
    while count < len(hashes) and budget.allows(_ALIKE_STEP):
        part = hashes[count : count + _ALIKE_STEP]
        with budget.measured(len(part)):
            case.must_set(store, space, case.contents(space, part))
        count += len(part)
    case.evidence["pages whose hashes begin alike"] = f"{count} of {most}"
    must_list(case, store, space, hashes[:count])


@check("KV-104", stochastic=True)
def what_sets_and_deletes_at_once_leave_is_listed(case: Case) -> None:
    """If a page was set, deleted and listed at the same time and is there, scan lists it afterwards."""
    store, space = open_store(case, 64)
    hashes = case.hashes(_RACED_PAGES)
    pages = case.contents(space, hashes)
    calls = (
        lambda: store.set(space, pages),
        lambda: store.delete(space, hashes),
        lambda: store.scan(space),
    )
    until_s = time.monotonic() + (_RACED_S_QUICK if case.quick else _RACED_S)
    turns = 0
    while time.monotonic() < until_s:
        call_at_once(calls)
        seen = zip(hashes, store.exists(space, hashes), strict=True)
        with note("it was set, deleted and listed at the same time"):
            must_list(case, store, space, [one for one, there in seen if there], others=hashes)
        turns += 1
    case.evidence["turns"] = str(turns)


@check("KV-104", Need.TAMPER, Need.SHARED, stochastic=True)
def a_page_that_is_set_during_a_listing_is_listed_later(case: Case) -> None:
    """If pages whose objects were lost are set again during a listing, later listings have them."""
    with open_fault_path(case, 64, short_timeout=False) as path:
        lister = path.caller("lister").probe.storage
        store, space = open_store(case, 64, tenant="lost")
        pages = case.contents(space, case.hashes(_LOST_PAGES))
        path.on_all(partial(FaultProxy.delay, seconds=_LATE_S))
        _lose(case, store, space, pages)
        began_s = time.monotonic()
        list(lister.scan(space))
        pause_s = (time.monotonic() - began_s) / _LOST_PAGES
        for _ in range(_LISTINGS_QUICK if case.quick else _LISTINGS):
            _lose(case, store, space, pages)
            with Threads() as threads:
                listing = threads.start(lambda: list(lister.scan(space)))
                for page_hash, data in pages.items():
                    listing.wait(pause_s)
                    store.set(space, {page_hash: data})
            seen = zip(pages, store.exists(space, list(pages)), strict=True)
            with note("its object was lost, and it was set again during another listing"):
                must_list(case, store, space, [one for one, is_there in seen if is_there])


def _lose(case: Case, store: Probe, space: KeySpace, pages: Mapping[str, bytes]) -> None:
    """Set pages, and remove their objects behind the store's back."""
    case.must_set(store, space, pages)
    for page_hash in pages:
        case.subject.tamper(space, page_hash, None)


@check("KV-104", Need.SHARED)
def a_page_of_a_set_that_broke_off_is_listed_if_it_is_there(case: Case) -> None:
    """If a writer is cut off before the last bytes of a set, a scan lists its page if it is there."""
    with open_fault_path(case, 1024) as path:
        writer, space = path.caller("writer"), path.space
        store = case.open()
        store.open_space(space)
        before = _bytes_up(path)
        path.answer_of(partial(writer.set, case.contents(space, case.hashes(1))))
        cost = _bytes_up(path) - before
        lacking = [nbytes for nbytes in _LACKING_NBYTES if nbytes < cost]
        for nbytes in lacking[: 1 if case.quick else None]:
            page = case.contents(space, case.hashes(1))
            path.on_all(partial(FaultProxy.silence_after, nbytes=cost - nbytes))
            writer.set(page)
            path.on_all(FaultProxy.drop_held)
            path.on_all(FaultProxy.pass_through)
            if store.exists(space, list(page)) == [True]:
                with note(f"its writer was cut off, {nbytes} bytes before the end of its set"):
                    listed = {info.page_hash for info in store.scan(space)}
                    none_of(store, "scan does not list a page that is there", page.keys() - listed)


def _bytes_up(path: FaultPath) -> int:
    return sum(proxy.bytes_up for proxy in path.proxies)


@check("KV-104", quick=False)
def long_listings_are_complete(case: Case) -> None:
    """A listing of more than a thousand pages contains each of them once."""
    store, space = open_store(case, 64)
    pages = store_many(case, store, space, 1030 if case.quick else 2060, limit_s=5)
    must_list(case, store, space, pages)


@check("KV-104", quick=False)
def ten_thousand_pages_are_listed_while_others_write(case: Case) -> None:
    """In a store of 10,000 pages, scan lists each page once while other pages come and go."""
    store, space = open_store(case, 64)
    pages = store_many(case, store, space, 10_000)
    churned = case.hashes(40)
    stop = threading.Event()

    def churn() -> int:
        turns = 0
        while not stop.is_set():
            store.set(space, case.contents(space, churned[turns % 2 :: 2]))
            store.delete(space, churned[turns % 3 :: 3])
            turns += 1
        return turns

    with Threads() as threads:
        writer = threads.start(churn)
        try:
            for _ in range(3):
                must_list(case, store, space, pages, others=churned)
        finally:
            stop.set()
        case.evidence["sets and deletes meanwhile"] = str(2 * writer.result())
    store.clear(space)


@check("KV-104")
def a_paused_listing_blocks_nobody(case: Case) -> None:
    """While the reader of a scan pauses, other threads can set, get, delete and scan."""
    store, space = open_store(case, 64)
    pages = case.stored(store, space, 20)
    (new,) = case.hashes(1)

    def work() -> None:
        open_and_set(case, store, space, new)
        store.delete(space, [new])
        must_list(case, store, space, pages)

    with Threads() as threads, closing(store.scanning(space)) as listing:
        next(listing, None)
        task = threads.start(work)
        if not task.wait(_CALL_LIMIT_S):
            sequence = case.trace.sequence()
            listing.close()
            raise store.violation(
                "while the reader of a scan paused, another thread's call did not return",
                expected="a listing that holds no lock between two steps",
                got=f"the call waited for {_CALL_LIMIT_S:.0f} s",
                sequence=sequence,
            )
        task.result()


@check("KV-104")
def a_listing_bears_deletes_by_its_reader(case: Case) -> None:
    """If a reader deletes each page that a scan gives it, the scan still gives all pages."""
    store, space = open_store(case, 64)
    pages = store_many(case, store, space, 150 if case.quick else 1100, limit_s=5)
    infos: list[PageInfo] = []
    for info in islice(store.scanning(space), len(pages) + 1):
        infos.append(info)
        store.delete(space, [info.page_hash])
    with note("each page was deleted when it had been listed"):
        _must_agree(case, store, space, infos, pages)
        must_list(case, store, space, [])


@check("KV-104")
def a_listing_bears_sets_by_its_reader(case: Case) -> None:
    """If a reader sets the first pages of a scan again, the scan still gives each page once."""
    store, space = open_store(case, 64)
    pages = store_many(case, store, space, 150 if case.quick else 1100, limit_s=5)
    infos: list[PageInfo] = []
    for info in islice(store.scanning(space), 2 * len(pages)):
        infos.append(info)
        if len(infos) <= _AGAIN:
            case.must_set(store, space, case.contents(space, [info.page_hash]))
    with note(f"the first {_AGAIN} pages were set again when they had been listed"):
        _must_agree(case, store, space, infos, pages)


@check("KV-104")
def a_listing_bears_changes_half_way(case: Case) -> None:
    """Scan lists the pages that are there from its first step to its last, whatever else changes."""
    store, space = open_store(case, 64)
    count = 150 if case.quick else 1100
    pages = list(store_many(case, store, space, count, limit_s=5))
    new = case.hashes(30)
    listing = store.scanning(space)
    infos = list(islice(listing, len(pages) // 3))
    listed = [info.page_hash for info in infos]
    deleted = listed[:10] + [page_hash for page_hash in pages if page_hash not in set(listed)][:20]
    store.delete(space, deleted)
    case.must_set(store, space, case.contents(space, new))
    infos += islice(listing, 2 * count)
    kept = [page_hash for page_hash in pages if page_hash not in set(deleted)]
    with note("other pages were set and deleted when a third of them was listed"):
        _must_agree(case, store, space, infos, kept, others=[*new, *deleted])
    must_list(case, store, space, [*kept, *new])


@check("KV-104")
def a_paused_listing_pins_no_room(case: Case) -> None:
    """While the reader of a scan pauses, a small store can reuse the room of deleted pages."""
    small = small_store(case)
    small.require_kept()
    store, space = small.probe, small.space
    pages = case.contents(space, case.hashes(max(2, small.pages // 2)))
    case.must_set(store, space, pages)
    with closing(store.scanning(space)) as listing:
        infos = list(islice(listing, 1))
        for turn in range(4 * small.pages):
            new = case.contents(space, case.hashes(1))
            if not all(store.set_once(space, new)):
                raise store.violation(
                    "a set was refused for lack of room while the reader of a scan paused",
                    expected=f"True: {len(pages)} pages are there, and {small.pages} have room",
                    got=f"False after {turn} pages were set and deleted",
                )
            store.delete(space, list(new))
        infos += listing
    with note("a small store was written to when its first page was listed"):
        _must_agree(case, store, space, [one for one in infos if one.page_hash in pages], pages)


@check("KV-104")
def two_listings_at_once_are_each_complete(case: Case) -> None:
    """Two scans that take turns each list every page, and giving one up does not disturb the other."""
    store = case.open()
    space, other = case.space(fitting(case, 64)), case.space(fitting(case, 64), pool="draft")
    for one in (space, other):
        store.open_space(one)
    pages, drafts = case.stored(store, space, 25), case.stored(store, other, 25)
    given_up = store.scanning(space)
    next(given_up, None)
    turns = list(islice(zip_longest(store.scanning(space), store.scanning(other)), 100))
    given_up.close()
    with note("two scans took turns, and a third was given up"):
        _must_agree(case, store, space, [one for one, _ in turns if one], list(pages))
        _must_agree(case, store, other, [two for _, two in turns if two], list(drafts))


@check("KV-104")
def a_page_that_is_being_set_is_listed_as_itself_or_not(case: Case) -> None:
    """While a page is being set, scan shows no temporary name and no part of a page."""
    store, space = open_store(case, 1024)
    pages = case.stored(store, space, 3)
    (late,) = case.hashes(1)
    with Threads() as threads:
        held = held_set(threads, store, space, case.contents(space, [late]))
        task = threads.attempt(lambda: must_list(case, store, space, pages, others=[late]))
        held.release()
        with note("while another page was being set"):
            task.result()


def must_list(
    case: Case,
    store: Probe,
    space: KeySpace,
    pages: Collection[str],
    *,
    others: Collection[str] = (),
) -> None:
    """Scan `space`. Each of `pages` must be listed once, and no other page except `others`."""
    _must_agree(case, store, space, store.scan(space), pages, others=others)


def _must_agree(
    case: Case,
    store: Probe,
    space: KeySpace,
    infos: Sequence[PageInfo],
    pages: Collection[str],
    *,
    others: Collection[str] = (),
) -> None:
    names = Counter(info.page_hash for info in infos)
    unexpected = names.keys() - set(pages) - set(others)
    none_of(store, "scan lists something that is not a page of the key space", unexpected)
    for info in infos:
        if info.nbytes != space.stored_nbytes:
            raise store.violation(
                "scan lists a page with the wrong size",
                expected=f"{space.stored_nbytes} bytes: {space.frame_nbytes} of the frame and"
                f" {space.page_nbytes} of the page",
                got=f"{info.page_hash[:8]}: {info.nbytes} bytes",
                sequence=case.trace.sequence(info.page_hash[:8], "scan"),
            )
    none_of(store, "scan lists a page twice", [one for one in pages if names[one] > 1])
    lacking = [page_hash for page_hash in pages if page_hash not in names]
    if lacking:
        seen = zip(lacking, store.exists(space, lacking), strict=True)
        none_of(
            store,
            "scan does not list a page that is there",
            [one for one, is_there in seen if is_there],
        )
        case.must_hold(store, space, case.contents(space, lacking[:1]))


def none_of(store: Probe, message: str, found: Collection[str]) -> None:
    """Raise `message` unless `found`, which holds wrong entries, is empty."""
    if found:
        first = min(found)
        raise store.violation(
            message,
            expected="each that is there, once, and nothing else",
            got=first if len(found) == 1 else f"{first}, and {len(found) - 1} others",
            sequence=store.trace.sequence(first[:8], ".scan ", ".spaces "),
        )
