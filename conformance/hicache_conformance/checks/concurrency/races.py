"""KV-501, KV-503: many threads use one storage as fast as possible."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotDeclared
from hicache_conformance.scenarios.contention import large_pages, must_be_intact, run_contended
from hicache_conformance.scenarios.setup import fitting, open_store
from hicache_conformance.tools.processes.threads import run_at_once

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_SMALL_NBYTES = 1024
_LARGE_NBYTES = 1 << 20
_NEW_SPACES = 300
_FILLED_SPACES = 16
_LEFT_SPACES = 30
"""How many new key spaces to make in a store that outlives the check and keeps them."""


@check("KV-501", stochastic=True)
def readers_see_no_torn_page_while_others_write_it(case: Case) -> None:
    """While writers set a page in one version after another, readers get one version, whole."""
    store = case.open()
    space, pages = large_pages(case, store, count=2, versions=3)
    run_contended(
        case,
        [
            *(partial(_set_one, store, space, pages, step) for step in (0, 1)),
            *(partial(_get_all, case, store, space, pages) for _ in range(2)),
        ],
    )
    if all(store.set(space, {h: versions[0] for h, versions in pages.items()})):
        case.must_hold(store, space, pages)


@check("KV-503", stochastic=True)
def pages_that_come_and_go_are_whole_or_misses(case: Case) -> None:
    """While other threads delete and set pages, a get returns each one whole or misses it."""
    store = case.open()
    other = case.open() if case.claims.shared else store
    for most_nbytes in (_LARGE_NBYTES, _SMALL_NBYTES):
        space, pages = large_pages(case, store, count=2, versions=2, most_nbytes=most_nbytes)
        other.open_space(space)
        come_and_go = partial(_set_and_delete, other, space, pages)
        look = partial(_read_all, case, store, space, pages)
        run_contended(case, [come_and_go, come_and_go, look, look], turns=2000)
        store.delete(space, list(pages))


@check("KV-503", stochastic=True)
def pages_evicted_under_readers_are_whole_or_misses(case: Case) -> None:
    """While other threads push pages out of a full store, a get returns each one whole or misses it."""
    if case.keeps:
        raise NotDeclared("pages stay until they are deleted")
    store, space = open_store(case, 4096)
    pages = {h: [data] for h, data in case.stored(store, space, 4).items()}
    others = case.contents(space, case.hashes(200))
    hashes = list(others)

    def push(turn: int) -> None:
        page_hash = hashes[turn % len(hashes)]
        store.set(space, {page_hash: others[page_hash]})

    def bring_back(turn: int) -> None:
        _set_one(store, space, pages, 0, turn)
        _get_all(case, store, space, pages, turn)

    run_contended(case, [push, push, bring_back, bring_back])


@check("KV-501", stochastic=True)
def threads_with_pages_of_their_own_keep_them(case: Case) -> None:
    """Pages of one thread do not change when other threads set, read and delete other pages."""
    store, space = open_store(case, _SMALL_NBYTES)
    own = [case.contents(space, case.hashes(6)) for _ in range(4)]

    def use(pages: Mapping[str, bytes], turn: int) -> None:
        deleted = list(pages)[turn % len(pages)]
        if case.keeps:
            case.must_set(store, space, pages)
            case.must_hold(store, space, pages)
        else:
            store.set(space, pages)
            _get_all(case, store, space, {h: [data] for h, data in pages.items()}, turn)
        store.delete(space, [deleted])
        case.must_miss(store, space, [deleted], "was deleted by the only thread that uses it")

    run_contended(case, [partial(use, pages) for pages in own], turns=200)
    run_at_once(
        [partial(_set_all, case, store, space, pages) for pages in own], turns=1, limit_s=60.0
    )
    case.must_hold(store, space, {h: data for pages in own for h, data in pages.items()})


@check("KV-501", stochastic=True)
def all_methods_at_once_raise_nothing(case: Case) -> None:
    """Sets, gets, deletes, listings, clears and openings at once raise nothing and tear no page."""
    store, space = open_store(case, _SMALL_NBYTES)
    contents = case.contents(space, case.hashes(8))
    pages = {page_hash: [data] for page_hash, data in contents.items()}
    hashes = list(pages)
    is_deployed = case.claims.shared and str(case.scratch.path) not in str(case.config)
    more = [
        case.space(fitting(case, 64), tenant=str(number))
        for number in range(_LEFT_SPACES if is_deployed else _NEW_SPACES)
    ]
    small = case.hashes(1)

    def open_more(turn: int) -> None:
        number = turn % len(more)
        store.open_space(more[number])
        if number < _FILLED_SPACES:
            store.set(more[number], case.contents(more[number], small))
        store.storage.stats()

    def change(turn: int) -> None:
        store.set(space, {h: contents[h] for h in hashes[turn % 8 :]})
        store.delete(space, hashes[turn % 5 : turn % 5 + 2])
        if case.claims.enumerable and turn % 4 == 0:
            store.clear(space)

    def look(turn: int) -> None:
        store.exists(space, hashes)
        _get_all(case, store, space, pages, turn)

    def walk(_: int) -> None:
        if case.claims.enumerable:
            store.spaces()
            _check_listing(store, space, set(hashes))

    run_contended(case, [open_more, change, change, look, walk, walk])
    case.must_set(store, space, contents)
    case.must_hold(store, space, contents)


# --- bodies of the threads -----------------------------------------------------------------------


def _set_one(
    store: Probe, space: KeySpace, pages: Mapping[str, Sequence[bytes]], step: int, turn: int
) -> None:
    """Set one page in the next version, after a delete if the store keeps the first version."""
    page_hash = list(pages)[(turn + step) % len(pages)]
    if not store.storage.capabilities.overwrites:
        store.delete(space, [page_hash])
    store.set(space, {page_hash: pages[page_hash][turn % len(pages[page_hash])]})


def _set_and_delete(
    store: Probe, space: KeySpace, pages: Mapping[str, Sequence[bytes]], turn: int
) -> None:
    _set_one(store, space, pages, 0, turn)
    store.delete(space, list(pages)[turn % 2 :][:1])


def _read_all(
    case: Case, store: Probe, space: KeySpace, pages: Mapping[str, Sequence[bytes]], turn: int
) -> None:
    store.exists(space, list(pages))
    _get_all(case, store, space, pages, turn)


def _set_all(case: Case, store: Probe, space: KeySpace, pages: Mapping[str, bytes], _: int) -> None:
    case.must_set(store, space, pages)


def _get_all(
    case: Case, store: Probe, space: KeySpace, pages: Mapping[str, Sequence[bytes]], _: int
) -> None:
    must_be_intact(case, store, space, pages, store.get(space, list(pages)))


def _check_listing(store: Probe, space: KeySpace, known: set[str]) -> None:
    for info in store.scan(space):
        if info.nbytes != space.stored_nbytes or info.page_hash not in known:
            raise store.violation(
                "scan lists something that is not a page while others write",
                expected=f"pages of {space.stored_nbytes} bytes that were set",
                got=str(info),
            )
