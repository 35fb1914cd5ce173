"""KV-203: if a hash occurs twice in a batch, each place has its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotDeclared
from hicache_conformance.scenarios.batch_answers import must_answer
from hicache_conformance.scenarios.setup import note, open_store

if TYPE_CHECKING:
    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace


@check("KV-203")
def duplicates_are_each_read(case: Case) -> None:
    """If a hash occurs twice in a get, each place has its verdict and its bytes."""
    store, space = _open_for_batches(case)
    pages = case.stored(store, space, 3)
    a, b, c = pages
    (absent,) = case.hashes(1)
    for hashes in (
        [a, a],
        [a, b, a],
        [a, a, b, c],
        [b, a, c, a, a, b],
        [absent, a, absent, a],
        [absent, absent],
        [a] * 9,
        [c, absent, b, absent, a, c, b, a],
    ):
        with note(f"in a batch of {len(hashes)} pages, {len(set(hashes))} of them different"):
            must_answer(case, store, space, hashes, pages)


@check("KV-203")
def duplicates_are_each_set(case: Case) -> None:
    """If a page occurs twice in a set, both verdicts are True, and every page is stored."""
    store, space = _open_for_batches(case)
    for order in ("aa", "aba", "aabc", "bacaab", "aaaaaaaaa", "abcabc"):
        names = dict(zip("abc", case.hashes(3), strict=True))
        hashes = [names[name] for name in order]
        pages = case.contents(space, list(dict.fromkeys(hashes)))
        _must_take(case, store, space, [(one, pages[one]) for one in hashes])
        with note(f"it was set in a batch of {len(order)}, {len(pages)} of them different"):
            must_answer(case, store, space, hashes, pages)


@check("KV-203")
def duplicates_with_other_bytes_leave_a_whole_page(case: Case) -> None:
    """If a page occurs twice in a set, with different bytes, one of the two is stored whole."""
    store, space = _open_for_batches(case)
    a, b = case.hashes(2)
    for _ in range(2):
        first, second = (case.contents(space, [a, b], version) for version in (0, 1))
        _must_take(case, store, space, [(a, first[a]), (b, first[b]), (a, second[a])])
        with note("it occurred twice in one set, with other bytes"):
            must_answer(case, store, space, [a, b, a], {a: [first[a], second[a]], b: first[b]})


@check("KV-203")
def duplicates_are_each_deleted(case: Case) -> None:
    """If a page occurs twice in a delete, both verdicts are True, and other pages stay."""
    store, space = _open_for_batches(case)
    for order in ("aa", "aba", "baab"):
        pages = case.stored(store, space, 3)
        names = dict(zip("abc", pages, strict=True))
        hashes = [names[name] for name in order]
        verdicts = store.delete(space, [*hashes, *case.hashes(1) * 2])
        if not all(verdicts):
            raise store.violation(
                "batch_delete is False for a page that occurs twice in the batch",
                expected="True for each: the page is gone",
                got=repr(verdicts),
            )
        case.must_miss(store, space, hashes, "was deleted, twice in one batch")
        case.must_hold(store, space, {h: d for h, d in pages.items() if h not in hashes})


def _open_for_batches(case: Case) -> tuple[Probe, KeySpace]:
    store, space = open_store(case, 200)
    if store.most_pages(space) == 1:
        raise NotDeclared("a batch holds one page only: its limits allow no more")
    return store, space


def _must_take(case: Case, store: Probe, space: KeySpace, items: list[tuple[str, bytes]]) -> None:
    verdicts = store.set_items(space, items)
    if not all(verdicts):
        violation = store.violation(
            "batch_set is False for a page that occurs twice in the batch",
            expected="True for each place of it",
            got=repr(verdicts),
        )
        raise case.refused(space, violation)
