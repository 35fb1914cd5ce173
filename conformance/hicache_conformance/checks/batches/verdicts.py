"""KV-201, KV-202: each page has one verdict, in order, whatever the other pages are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.scenarios.batch_answers import calls, must_answer
from hicache_conformance.scenarios.setup import TimeBudget, note, open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_COUNTS = (1, 2, 3, 8, 17, 33)


# --- KV-201 --------------------------------------------------------------------------------------


@check("KV-201")
def an_empty_batch_gives_an_empty_list(case: Case) -> None:
    """A call without hashes returns `[]`, in an empty key space and in one that holds pages."""
    store, space = open_store(case, 96)
    pages: dict[str, bytes] = {}
    for _ in range(2):
        for call in calls(store, space).values():
            call([], [])  # The probe checks the length of the answer.
        pages.update(case.stored(store, space, 2))
    case.must_hold(store, space, pages)


@check("KV-201")
def a_batch_gives_one_bool_a_page(case: Case) -> None:
    """Every call returns a list with one bool per hash, for hits, misses and mixtures."""
    store, space = open_store(case, 96)
    budget = TimeBudget()
    for count in _COUNTS:
        if not budget.allows(count):
            break
        with budget.measured(count):
            pages = case.contents(space, case.hashes(count))
            there, absent = list(pages), case.hashes(count)
            store.set(space, pages)
            for hashes in (there, absent, absent + there, there + absent):
                store.exists(space, hashes)
                store.get(space, hashes)
            store.set(space, pages)
            store.delete(space, [*there[: count // 2 + 1], *absent])
            store.delete(space, there)


@check("KV-201")
def verdicts_are_in_the_order_of_the_hashes(case: Case) -> None:
    """Each verdict stands at the place of its hash, in whatever order the hashes come."""
    store, space = open_store(case, 96)
    pages = case.stored(store, space, 9)
    orders = [[*pages, *case.hashes(9)] for _ in range(3)]
    orders += [sorted(orders[0]), sorted(orders[0], reverse=True), [*reversed(orders[1])]]
    for turn, hashes in enumerate(orders):
        if turn < 3:
            case.random.shuffle(hashes)
        must_answer(case, store, space, hashes, pages)


@check("KV-201")
def hashes_may_come_as_a_tuple(case: Case) -> None:
    """Hashes and pages may come in any sequence, such as a tuple."""
    store, space = open_store(case, 96)
    pages = case.contents(space, case.hashes(min(3, store.most_pages(space))))
    memory = store.memory(space, len(pages)).filled_with(list(pages.values()))
    given = tuple(pages), tuple(memory.pages)
    by_name = calls(store, space)
    with note("the hashes and the pages are tuples"):
        if not all(by_name["batch_set"](*given)):
            raise case.refused(space, store.violation("batch_set refused a tuple of pages"))
        case.must_hold(store, space, pages)
        for operation in ("batch_exists", "batch_get", "batch_delete"):
            by_name[operation](*given)
        case.must_miss(store, space, list(pages), "was deleted")


@check("KV-201")
def the_callers_lists_are_left_alone(case: Case) -> None:
    """A call does not change the lists of hashes and pages that it receives."""
    store, space = open_store(case, 96)
    pages = case.contents(space, case.hashes(min(5, store.most_pages(space))))
    for operation, call in calls(store, space).items():
        for hashes in (list(pages), case.hashes(len(pages))):
            memory = store.memory(space, len(pages)).filled_with(list(pages.values()))
            given = (list(hashes), list(memory.pages))
            call(*given)
            if given != (hashes, memory.pages):
                raise store.violation(
                    f"{operation} changed the list of hashes or of pages that it was given",
                    expected=", ".join(one[:8] for one in hashes),
                    got=", ".join(one[:8] for one in given[0]),
                )


@check("KV-201")
def the_answer_is_the_callers(case: Case) -> None:
    """If a caller changes a returned list of verdicts, later answers do not change."""
    store, space = open_store(case, 96)
    pages = case.stored(store, space, 2)
    hashes = [*pages, *case.hashes(1)]
    for _ in range(2):
        for page_hash in hashes:
            must_answer(case, store, space, [page_hash], pages)
            memory = store.memory(space, 1)
            for answer in (
                store.storage.batch_exists(space, [page_hash]),
                store.storage.batch_get(space, [page_hash], memory.pages),
            ):
                answer[:] = [not answer[0]] * 3
            with note("the caller had changed the list of an earlier answer"):
                must_answer(case, store, space, [page_hash], pages)


# --- KV-202 --------------------------------------------------------------------------------------


@check("KV-202")
def a_missing_page_changes_no_other(case: Case) -> None:
    """If pages of a batch are missing, the others are still found and read as they were set."""
    store, space = open_store(case, 96)
    for count in (2, 3, 9, 16):
        pages = case.stored(store, space, count)
        hashes = list(pages)
        absent = case.hashes(count)
        for places in _places(count):
            batch = [absent[i] if i in places else hashes[i] for i in range(count)]
            with note(f"pages {_listed(places)} of a batch of {count} are missing"):
                must_answer(case, store, space, batch, pages)


@check("KV-202")
def each_page_of_a_batch_has_its_own_bytes(case: Case) -> None:
    """Pages that are set in one batch can be read one by one, and the other way round, in any order."""
    store, space = open_store(case, 96)
    for count in (2, 3, 20):
        together = case.stored(store, space, count)
        for page_hash, data in together.items():
            case.must_hold(store, space, {page_hash: data})
        alone = case.contents(space, case.hashes(count))
        for page_hash, data in alone.items():
            case.must_set(store, space, {page_hash: data})
        mixed = [*together.items(), *alone.items()]
        case.random.shuffle(mixed)
        with note("some pages were set in a batch, and some one by one"):
            case.must_hold(store, space, dict(mixed))


@check("KV-202")
def a_present_page_in_a_set_changes_no_other(case: Case) -> None:
    """If some pages of a set are present, the others are stored with their own bytes."""
    store, space = open_store(case, 96)
    for count in (2, 3, 8):
        for places in _places(count):
            pages = case.contents(space, case.hashes(count))
            present = {h: pages[h] for i, h in enumerate(pages) if i in places}
            with note(f"pages {_listed(places)} of a batch of {count} were there already"):
                case.must_set(store, space, present)
                case.must_set(store, space, pages)
                case.must_hold(store, space, pages)


@check("KV-202")
def an_absent_page_in_a_delete_changes_no_other(case: Case) -> None:
    """If some pages of a delete are absent, the others are deleted, and nothing else."""
    store, space = open_store(case, 96)
    for count in (2, 3, 8):
        for places in _places(count):
            pages = case.stored(store, space, count)
            stays = case.stored(store, space, 1)
            absent = case.hashes(count)
            batch = [absent[i] if i in places else h for i, h in enumerate(pages)]
            with note(f"pages {_listed(places)} of a batch of {count} were not there"):
                store.delete(space, batch)
                case.must_miss(store, space, batch, "was deleted")
                kept = {h: pages[h] for i, h in enumerate(pages) if i in places}
                case.must_hold(store, space, {**kept, **stays})


@check("KV-202", Need.TAMPER)
def a_damaged_page_changes_no_other(case: Case) -> None:
    """If a page was cut or removed behind the store's back, other pages of its batch do not change."""
    store, space = open_store(case, 96)
    for place in (0, 2, 4):
        for description in ("cut in half", "removed"):
            pages = case.stored(store, space, 5)
            page_hash, data = list(pages.items())[place]
            half = data[: len(data) // 2]
            case.subject.tamper(space, page_hash, half if description == "cut in half" else None)
            with note(f"page {place} of its batch was {description} behind the store's back"):
                _must_read_all_but(case, store, space, pages, page_hash)


def _must_read_all_but(
    case: Case, store: Probe, space: KeySpace, pages: dict[str, bytes], damaged: str
) -> None:
    for page_hash, data in zip(pages, store.get(space, list(pages)), strict=True):
        if data is None and page_hash != damaged:
            case.missed(store, space, page_hash)
        elif data not in (None, pages[page_hash]):
            raise case.wrong_bytes(store, space, page_hash, data or b"", [pages[page_hash]])


def _places(count: int) -> list[tuple[int, ...]]:
    """Return sets of places in a batch: the first, the last, a middle one, most, and all of them."""
    every = tuple(range(count))
    chosen = [(0,), (count - 1,), (count // 2,), every[::2], every[1:], every[:-1], every]
    return list(dict.fromkeys(chosen))


def _listed(places: Sequence[int]) -> str:
    return ", ".join(map(str, places[:4])) + (", ..." if len(places) > 4 else "")
