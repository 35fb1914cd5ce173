"""KV-501, KV-503: the kit holds a call half way through a page while others run.

So the checks choose the interleavings. A store may let the other call wait for the held one.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.run.outcomes import NotDeclared
from hicache_conformance.scenarios.contention import must_be_intact
from hicache_conformance.scenarios.setup import open_store
from hicache_conformance.tools.processes.threads import Threads, WaitLimit, held_get, held_set

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_PAGE_NBYTES = 12_288
_HOLD_BEFORE = (7, 0, 4)
"""A call is held before one of these segments, of eight."""
_MOST_PUSHED_NBYTES = 8 << 20
_MOST_PUSHED_PAGES = 2000
_PUSH_LIMIT_S = 3.0


@check("KV-501")
def a_get_while_the_page_is_set_is_a_miss_or_whole(case: Case) -> None:
    """While a set is half way through a page, a get of it is a miss or returns the whole page."""
    for store, other, space, point in _hold_points(case):
        for versions in (1, 2):
            page_hash, contents = _versions(case, store, space, versions)
            with Threads(point.wait_limit) as threads:
                held = held_set(
                    threads, store, space, {page_hash: contents[-1]}, before=point.before
                )
                reading = threads.attempt(other.get, space, [page_hash])
                threads.attempt(other.exists, space, [page_hash])
                taken = held.release()
                must_be_intact(case, store, space, {page_hash: contents}, reading.result())
            if taken == [True] or versions > 1:
                case.must_hold(store, space, {page_hash: contents})
            store.delete(space, [page_hash])


@check("KV-501")
def a_set_while_the_page_is_got_leaves_the_get_whole(case: Case) -> None:
    """While a get is half way through a page, a set of new bytes does not mix into what it reads."""
    for store, other, space, point in _hold_points(case):
        page_hash, contents = _versions(case, store, space, 2)
        with Threads(point.wait_limit) as threads:
            held = held_get(threads, store, space, [page_hash], before=point.before)
            threads.attempt(other.set, space, {page_hash: contents[1]})
            must_be_intact(case, store, space, {page_hash: contents}, held.release())
        case.must_hold(store, space, {page_hash: contents})
        store.delete(space, [page_hash])


@check("KV-501")
def two_sets_of_one_page_leave_one_of_them(case: Case) -> None:
    """If a set of a page is half way and another set of it runs, one of the two is stored whole."""
    for store, other, space, point in _hold_points(case):
        (page_hash,) = case.hashes(1)
        contents = [case.contents(space, [page_hash], version)[page_hash] for version in range(2)]
        with Threads(point.wait_limit) as threads:
            held = held_set(threads, store, space, {page_hash: contents[0]}, before=point.before)
            second = threads.attempt(_set_in_segments, other, space, {page_hash: contents[1]})
            verdicts = held.release() + second.result()
        if True in verdicts:
            case.must_hold(store, space, {page_hash: contents})
        store.delete(space, [page_hash])


@check("KV-501")
def calls_about_different_pages_do_not_meet(case: Case) -> None:
    """While a get and a set are half way, calls about other pages do not mix their bytes with them."""
    for store, other, space, point in _hold_points(case):
        pages = case.contents(space, case.hashes(4))
        got, set_late, got_later, set_later = pages
        case.must_set(store, space, {got: pages[got], got_later: pages[got_later]})
        with Threads(point.wait_limit) as threads:
            reading = held_get(threads, store, space, [got], before=point.before)
            writing = held_set(
                threads, store, space, {set_late: pages[set_late]}, before=point.before
            )
            threads.attempt(_set_in_segments, other, space, {set_later: pages[set_later]})
            second = threads.attempt(other.get, space, [got_later], segments=8)
            threads.open_gates()
            taken = writing.release()
            must_be_intact(case, store, space, {got: [pages[got]]}, reading.release())
            must_be_intact(case, store, space, {got_later: [pages[got_later]]}, second.result())
        if taken == [True]:
            case.must_hold(store, space, {set_late: pages[set_late]})
        case.must_hold(store, space, {got_later: pages[got_later]})
        store.delete(space, list(pages))


@check("KV-501")
def a_delete_while_the_page_is_set_leaves_all_or_nothing(case: Case) -> None:
    """While a set is half way, a delete leaves its page absent or whole, and it can be set again."""
    for store, other, space, point in _hold_points(case):
        page_hash, contents = _versions(case, store, space, 2)
        with Threads(point.wait_limit) as threads:
            held = held_set(threads, store, space, {page_hash: contents[1]}, before=point.before)
            threads.attempt(other.delete, space, [page_hash])
            held.release()
        must_be_intact(case, store, space, {page_hash: contents}, store.get(space, [page_hash]))
        case.must_set(store, space, {page_hash: contents[0]})
        case.must_hold(store, space, {page_hash: contents})
        store.delete(space, [page_hash])


@check("KV-501", Need.ENUMERABLE)
def listings_and_clear_while_a_page_is_set_show_no_half_page(case: Case) -> None:
    """While a set is half way, scan lists only whole pages, and clear leaves none torn."""
    for store, other, space, point in _hold_points(case):
        kept = case.stored(store, space, 1)
        late = case.contents(space, case.hashes(1))
        (page_hash,) = late
        with Threads(point.wait_limit) as threads:
            held = held_set(threads, store, space, late, before=point.before)
            listing = threads.attempt(other.scan, space)
            threads.attempt(other.clear, space)
            held.release()
            listed = listing.result()
        unexpected = [
            info
            for info in listed
            if info.nbytes != space.stored_nbytes or info.page_hash not in (*kept, page_hash)
        ]
        if unexpected:
            raise store.violation(
                "scan lists something that is not a page while another call sets one",
                expected=f"pages of {space.stored_nbytes} bytes",
                got=str(unexpected[0]),
            )
        found = store.get(space, [page_hash])
        must_be_intact(case, store, space, {page_hash: list(late.values())}, found)
        store.clear(space)


@check("KV-503")
def a_page_deleted_between_exists_and_get_is_a_miss(case: Case) -> None:
    """If a page is deleted after `exists` returned True, `get` misses it and still reads the others."""
    store, space = open_store(case, _PAGE_NBYTES)
    other = case.open() if case.claims.shared else store
    other.open_space(space)
    for _ in range(2 if case.quick else 5):
        pages = case.stored(store, space, 3)
        deleted = case.random.choice(list(pages))
        store.exists(space, list(pages))
        other.delete(space, [deleted])
        found = dict(zip(pages, store.get(space, list(pages)), strict=True))
        if found[deleted] is not None:
            case.must_miss(store, space, [deleted], "was deleted after exists said True")
        kept = {page_hash: data for page_hash, data in pages.items() if page_hash != deleted}
        case.must_hold(store, space, kept)
        store.delete(space, list(pages))


@check("KV-503")
def a_page_deleted_while_it_is_got_is_whole_or_a_miss(case: Case) -> None:
    """If a page is deleted during a get and others take its room, the get returns it whole or misses."""
    for store, other, space, point in _hold_points(case):
        pages = case.stored(store, space, 1)
        (page_hash,) = pages
        with Threads(point.wait_limit) as threads:
            held = held_get(threads, store, space, [page_hash], before=point.before)
            threads.attempt(other.delete, space, [page_hash])
            threads.attempt(other.set, space, case.contents(space, case.hashes(2)))
            must_be_intact(case, store, space, {page_hash: list(pages.values())}, held.release())
        case.must_miss(store, space, [page_hash], "was deleted while it was got")


@check("KV-503")
def a_page_deleted_while_its_batch_is_got_is_a_miss(case: Case) -> None:
    """If one page of a get is deleted when half of the batch is read, every hit has the right bytes."""
    for store, other, space, point in _hold_points(case):
        if store.most_pages(space) == 1:
            raise NotDeclared("the store takes one page a call")
        pages = case.stored(store, space, 2)
        with Threads(point.wait_limit) as threads:
            held = held_get(threads, store, space, list(pages), before=point.before)
            threads.attempt(other.delete, space, list(pages)[1:])
            must_be_intact(
                case, store, space, {h: [data] for h, data in pages.items()}, held.release()
            )
        store.delete(space, list(pages))


@check("KV-503")
def a_page_evicted_while_it_is_got_is_whole_or_a_miss(case: Case) -> None:
    """If a page is evicted during a get, the get returns the right bytes or a miss."""
    if case.keeps:
        case.evidence["evicted"] = "never: pages stay until they are deleted"
        return
    evicted = 0
    for store, other, space, point in _hold_points(case):
        pages = case.stored(store, space, 1)
        (page_hash,) = pages
        with Threads(point.wait_limit) as threads:
            held = held_get(threads, store, space, [page_hash], before=point.before)
            moved = threading.Event()
            pushing = threads.attempt(_push_out, case, other, space, page_hash, moved)
            if moved.is_set():  # The set did not wait for the get.
                pushing.wait(_PUSH_LIMIT_S)
            found = held.release()
            evicted += pushing.result()
        must_be_intact(case, store, space, {page_hash: list(pages.values())}, found)
        if not evicted:
            break  # The store has more room than the check can fill.
    case.evidence["evicted"] = f"{evicted} times"


def _push_out(
    case: Case, store: Probe, space: KeySpace, page_hash: str, moved: threading.Event
) -> bool:
    """Set other pages until the store evicts this one. Return False if it has too much room."""
    until_s = time.monotonic() + _PUSH_LIMIT_S
    most = min(_MOST_PUSHED_PAGES, max(16, _MOST_PUSHED_NBYTES // space.stored_nbytes))
    for pushed in range(1, most):
        store.set(space, case.contents(space, case.hashes(1)))
        moved.set()
        # A lookup may count as a use, so the check makes few of them.
        is_looked_at = pushed % 8 == 0 and pushed & (pushed - 1) == 0
        if is_looked_at and store.exists(space, [page_hash]) == [False]:
            return True
        if time.monotonic() > until_s:
            break
    return False


# --- parts of the checks -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _HoldPoint:
    """A segment before which a call is held, and how long another call may wait for it."""

    before: int
    wait_limit: WaitLimit


def _hold_points(case: Case) -> Iterator[tuple[Probe, Probe, KeySpace, _HoldPoint]]:
    """Yield a handle whose calls are held, a handle for other calls, a key space and a hold point."""
    store, space = open_store(case, _PAGE_NBYTES)
    other, wait_limit = store, WaitLimit()
    numbers = _HOLD_BEFORE if case.claims.scatter_gather and not case.quick else _HOLD_BEFORE[:1]
    for before in numbers:
        yield store, other, space, _HoldPoint(before, wait_limit)
        if other is store and case.claims.shared:
            other = case.open()
            other.open_space(space)


def _versions(case: Case, store: Probe, space: KeySpace, count: int) -> tuple[str, list[bytes]]:
    """Return a fresh page with its possible contents. All contents but the last have been set."""
    hashes = case.hashes(1)
    pages = [case.contents(space, hashes, version) for version in range(count)]
    for each in pages[:-1]:
        case.must_set(store, space, each)
    return hashes[0], [each[hashes[0]] for each in pages]


def _set_in_segments(store: Probe, space: KeySpace, contents: Mapping[str, bytes]) -> list[bool]:
    return store.set(space, contents, segments=8)
