"""KV-204: batches of every size that the store accepts work as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.scenarios.batch_answers import must_answer
from hicache_conformance.scenarios.edge_cases import batch_sizes
from hicache_conformance.scenarios.setup import TimeBudget, note, open_store

if TYPE_CHECKING:
    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_LOOKED_UP = 10_000
_LARGEST_SET = 1025
_LARGEST_SET_QUICK = 129
_LARGE_NBYTES = 8 << 20
_SPLITS = (32 << 20, 64 << 20, 128 << 20)
_BEYOND = 2
"""The pages behind a split. A store that mixes them up needs more than one."""
_MOST_PAGES = 256
_LARGE_LIMIT_S = 60.0
_LIMIT_S = 6.0
"""If a batch takes longer than this, the store is slow and gets smaller ones."""


@check("KV-204")
def ten_thousand_pages_are_looked_up(case: Case) -> None:
    """Exists finds all present pages among 10,000 hashes in one call, at any place."""
    store, space = open_store(case, 24)
    pages = case.stored(store, space, 24)
    budget = TimeBudget(_LIMIT_S)
    for count in (100, 1000, 4000, _LOOKED_UP):
        if not budget.allows(count):
            break
        case.evidence["pages looked up at once"] = str(count)
        hashes = case.hashes(count)
        places = {0, count - 1, *case.random.sample(range(count), 22)}
        for place, page_hash in zip(sorted(places), pages, strict=False):
            hashes[place] = page_hash
        with note(f"in a lookup of {count} pages"), budget.measured(count):
            _must_find(case, store, space, hashes, pages)


@check("KV-204", quick=False)
def batches_of_every_size_are_set(case: Case) -> None:
    """A set stores every page of its batch, at sizes around those where stores split batches."""
    store, space = open_store(case, 24)
    budget = TimeBudget(_LIMIT_S)
    for count in batch_sizes(min(_largest(case), store.most_pages(space))):
        if not budget.allows(count):
            break
        case.evidence["largest batch set"] = str(count)
        with note(f"it was set in a batch of {count}"), budget.measured(count):
            _must_keep(case, store, space, count)


@check("KV-204")
def batches_of_every_size_are_read(case: Case) -> None:
    """A get reads every page of its batch, at sizes around those where stores split batches."""
    store, space = open_store(case, 24)
    pages: dict[str, bytes] = {}
    budget = TimeBudget(_LIMIT_S)
    for count in batch_sizes(min(_largest(case), store.most_pages(space))):
        if not budget.allows(count):
            break
        case.evidence["largest batch read"] = str(count)
        with note(f"in batches of {count} pages"), budget.measured(count):
            # The sets are small batches, because this check is about gets.
            while len(pages) < count:
                pages.update(case.stored(store, space, min(8, count - len(pages))))
            must_answer(case, store, space, case.random.sample(list(pages), count), pages)


@check("KV-204")
def a_batch_of_many_bytes_is_set_and_read(case: Case) -> None:
    """A batch of pages of 1 MiB each is set and read like a batch of small pages."""
    store, space = open_store(case, 1 << 20)
    budget = TimeBudget(_LIMIT_S)
    for count in (2, 6, 18) if case.quick else (2, 6, 18, 40, 72):
        if count > store.max_batch or not budget.allows(count):
            break
        if not _is_taken_whole(case, store, space, count, budget):
            break


@check("KV-204")
def batches_past_the_sizes_at_which_stores_split_are_whole(case: Case) -> None:
    """Batches of more than 32, 64 and 128 MiB are set and read, each page with its own bytes."""
    store, space = open_store(case, _LARGE_NBYTES)
    most = store.most_pages(space)
    budget = TimeBudget(_LARGE_LIMIT_S)
    for split_nbytes in _SPLITS[:1] if case.quick else _SPLITS:
        count = min(split_nbytes // space.stored_nbytes + _BEYOND, most, _MOST_PAGES)
        if not budget.allows(count):
            break
        if not _is_taken_whole(case, store, space, count, budget) or count == most:
            break


def _is_taken_whole(
    case: Case, store: Probe, space: KeySpace, count: int, budget: TimeBudget
) -> bool:
    """Set, read and delete a batch. Return False if the store, which may be full, refused some of it."""
    nbytes = count * space.stored_nbytes
    with note(f"in a batch of {count} pages, {nbytes} bytes"), budget.measured(count):
        pages = case.contents(space, case.hashes(count))
        if not all(store.set(space, pages)):
            _must_take_no_more(store, space, pages)
            return False
        case.must_hold(store, space, pages)
        store.delete(space, list(pages))
    case.evidence["largest batch"] = f"{nbytes} bytes"
    return True


def _must_take_no_more(store: Probe, space: KeySpace, pages: dict[str, bytes]) -> None:
    """Raise if the store accepts pages one by one that it refused in a batch."""
    if all(store.set(space, {page_hash: data}) == [True] for page_hash, data in pages.items()):
        raise store.violation(
            f"batch_set refuses a batch of {len(pages)} pages, and takes each of them alone",
            expected="True for each, or a declared max_batch",
            got="False",
        )
    store.delete(space, list(pages))


def _must_find(
    case: Case, store: Probe, space: KeySpace, hashes: list[str], pages: dict[str, bytes]
) -> None:
    for place, (page_hash, there) in enumerate(
        zip(hashes, store.exists(space, hashes), strict=True)
    ):
        if there and page_hash not in pages:
            raise store.violation(
                "batch_exists is True for a page that was never set",
                expected="False",
                got=f"True for page {place} of {len(hashes)}",
            )
        if not there and page_hash in pages:
            case.missed(store, space, page_hash, "batch_exists")


def _must_keep(case: Case, store: Probe, space: KeySpace, count: int) -> None:
    pages = case.stored(store, space, count)
    case.must_hold(store, space, pages)
    store.delete(space, list(pages))
    case.must_miss(store, space, [*pages][-3:] + [*pages][:1], f"was deleted in a batch of {count}")


def _largest(case: Case) -> int:
    return _LARGEST_SET_QUICK if case.quick else _LARGEST_SET
