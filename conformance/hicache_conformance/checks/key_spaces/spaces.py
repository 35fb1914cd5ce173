"""KV-101, KV-102: different key spaces share nothing."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

from hicache_conformance.checks import check
from hicache_conformance.run.subject import Scratch
from hicache_conformance.scenarios.key_space_neighbours import (
    Neighbour,
    colliding_fields,
    equal_when_joined,
    known_similar_ids,
    neighbours,
    odd_texts,
    rich_space,
)
from hicache_conformance.scenarios.setup import (
    another_handle,
    fitting,
    note,
    open_and_set,
    stores_named,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_JOINED = ("tenant", "model", "pool", "revision", "dtype", "layout")
_SEPARATORS = ("", "-", "/", "_", ":", "@", "|", ".", ",")


# --- KV-101 --------------------------------------------------------------------------------------


@check("KV-101")
def a_page_is_not_seen_from_a_neighbour(case: Case) -> None:
    """A page that was set in one key space is a miss in all others that differ in one field."""
    store = case.open()
    base, others = _neighbourhood(case)
    store.open_space(base)
    pages = case.stored(store, base, 2)
    for other in others:
        store.open_space(other.space)
        why = f"was set in a key space that differs in {other.difference}"
        case.must_miss(store, other.space, list(pages), why)
    case.must_hold(store, base, pages)


@check("KV-101")
def each_neighbour_keeps_bytes_of_its_own(case: Case) -> None:
    """Key spaces that differ in one field keep different bytes under one hash."""
    store = case.open()
    base, others = _neighbourhood(case)
    store.open_space(base)
    pages = case.stored(store, base, len(others))
    for (page_hash, data), other in zip(pages.items(), others, strict=True):
        with note(f"after it was set in a key space that differs in {other.difference}"):
            open_and_set(case, store, other.space, page_hash)
            case.must_hold(store, base, {page_hash: data})
    for page_hash, other in zip(pages, others, strict=True):
        with note(f"it differs from another that has this hash in {other.difference}"):
            case.must_hold(store, other.space, case.contents(other.space, [page_hash]))


@check("KV-101")
def a_delete_spares_the_neighbours(case: Case) -> None:
    """Deleting a page in one key space leaves pages with the same hash in others."""
    store = case.open()
    base, others = _neighbourhood(case)
    store.open_space(base)
    pages = case.stored(store, base, len(others))
    for (page_hash, data), other in zip(pages.items(), others, strict=True):
        store.open_space(other.space)
        store.delete(other.space, [page_hash])
        with note(f"it was deleted in a key space that differs in {other.difference}"):
            case.must_hold(store, base, {page_hash: data})


@check("KV-101")
def fields_do_not_run_together(case: Case) -> None:
    """Key spaces stay apart even if their fields are equal once swapped, joined or summed up."""
    store = case.open()
    for description, one, other in colliding_fields(_base_space(case)):
        if max(one.stored_nbytes, other.stored_nbytes) <= fitting(case, 256):
            with note(f"two key spaces are taken for one: {description}"):
                _must_be_apart(case, store, [one, other])


@check("KV-101")
def texts_do_not_run_together(case: Case) -> None:
    """Key spaces stay apart even if their texts are equal once joined with any separator."""
    store = case.open()
    base = case.space(fitting(case, 64))
    for separator in _SEPARATORS[:3] if case.quick else _SEPARATORS:
        spaces = equal_when_joined(base, separator, case.scratch.prefix)
        with note(f"{', '.join(spaces)} are joined by {separator!r}, which occurs in them"):
            _must_be_apart(case, store, list(spaces.values()))


@check("KV-101")
def texts_may_be_odd(case: Case) -> None:
    """Key spaces stay apart if texts differ in slashes, dots, spaces, case, accents or a long tail."""
    store = case.open()
    (page_hash,) = case.hashes(1)
    odd = list(odd_texts(case.space(fitting(case, 64)), quick=case.quick))
    for description, space in odd:
        with note(description):
            store.open_space(space)
            case.must_miss(store, space, [page_hash], "was set in other key spaces only")
            open_and_set(case, store, space, page_hash)
    for description, space in odd:
        with note(f"{description}, after others were set"):
            case.must_hold(store, space, case.contents(space, [page_hash]))


@check("KV-101")
def ids_that_are_alike_are_not_equal(case: Case) -> None:
    """Key spaces stay apart if their ids begin or end with the same digits."""
    store = case.open()
    # These key spaces are the same in every run, so the hash keeps runs on one store apart.
    page_hash = hashlib.sha256(case.scratch.prefix.encode()).hexdigest()
    for description, one, other in known_similar_ids():
        if one.stored_nbytes <= fitting(case, one.stored_nbytes):
            with note(f"two key spaces are taken for one: {description}"):
                _must_be_apart(case, store, [one, other], page_hash)


@check("KV-101")
def a_stores_name_does_not_run_into_a_field(case: Case) -> None:
    """Stores under similar names stay apart, even if the rest of a name is in a field of the other."""
    name = case.scratch.prefix
    base = case.space(fitting(case, 64))
    fields = _JOINED[:3] if case.quick else _JOINED
    for other, rest in ((f"{name}7", ("7", "")), (f"x{name}", ("", "x"))):
        plain, joined = case.open(_named(case, name)), case.open(_named(case, other))
        for field in fields:
            text = getattr(base, field)
            changed: dict[str, Any] = {field: rest[0] + text + rest[1]}
            with note(
                f"a store called NAME, with {field} {changed[field]!r}, and another one called"
                f" {other.replace(name, 'NAME')}, with {field} {text!r}"
            ):
                _must_be_two(case, (plain, replace(base, **changed)), (joined, base))


@check("KV-101")
def stores_whose_names_are_alike_are_apart(case: Case) -> None:
    """Stores stay apart if only a dash, a dot or an underscore differs in their names."""
    name = case.scratch.prefix
    stores = stores_named(case, *(f"{name}{sign}a" for sign in "-_."))
    space = case.space(fitting(case, 64))
    for (one, store), (other, neighbour) in permutations(stores.items(), 2):
        with note(f"in stores called {one} and {other}"):
            _must_be_two(case, (store, space), (neighbour, space))


def _named(case: Case, name: str) -> Mapping[str, Any]:
    """Return the config of a store with this name, both as its prefix and as its directory."""
    path = case.scratch.path / name
    path.mkdir(exist_ok=True)
    return case.subject.config(Scratch(path, name))


def _must_be_two(case: Case, one: tuple[Probe, KeySpace], other: tuple[Probe, KeySpace]) -> None:
    """Raise if a page of one store shows in the other. Clearing one must leave the other's page."""
    hashes = case.hashes(1)
    (store, space), (neighbour, elsewhere) = one, other
    open_and_set(case, store, space, *hashes)
    case.must_miss(neighbour, elsewhere, hashes, "was set in another store")
    open_and_set(case, neighbour, elsewhere, *hashes)
    if case.claims.enumerable and "clear" not in case.absent:
        neighbour.clear(elsewhere)
        case.must_hold(store, space, case.contents(space, hashes))
        case.must_miss(neighbour, elsewhere, hashes, "was cleared")
    else:
        case.must_hold(neighbour, elsewhere, case.contents(elsewhere, hashes))
        case.must_hold(store, space, case.contents(space, hashes))


@check("KV-101")
def another_handle_keeps_neighbours_apart(case: Case) -> None:
    """A handle that opens the key spaces in another order finds in each what was set there."""
    store = case.open()
    base, others = _neighbourhood(case)
    (page_hash,) = case.hashes(1)
    open_and_set(case, store, base, page_hash)
    for other in others:
        open_and_set(case, store, other.space, page_hash)
    again = another_handle(case, store)
    for other in reversed(others):
        with note(f"it differs from another that has this hash in {other.difference}"):
            again.open_space(other.space)
            case.must_hold(again, other.space, case.contents(other.space, [page_hash]))
    again.open_space(base)
    case.must_hold(again, base, case.contents(base, [page_hash]))


def _must_be_apart(
    case: Case, store: Probe, spaces: Sequence[KeySpace], page_hash: str = ""
) -> None:
    """Raise if a page of one key space shows in another. Each must keep its own page."""
    page_hash = page_hash or case.hashes(1)[0]
    for space in spaces:
        store.open_space(space)
        case.must_miss(store, space, [page_hash], "was set in another key space")
        open_and_set(case, store, space, page_hash)
    for space in spaces:
        case.must_hold(store, space, case.contents(space, [page_hash]))


def _base_space(case: Case) -> KeySpace:
    whole = fitting(case, 256)
    return rich_space(case.space(whole - whole // 4, frame_nbytes=whole // 4))


def _neighbourhood(case: Case) -> tuple[KeySpace, list[Neighbour]]:
    base = _base_space(case)
    return base, neighbours(base, quick=case.quick)


# --- KV-102 --------------------------------------------------------------------------------------

_POOLS = {
    "kv": 4096,
    "draft": 1000,
    "draft_indexer": 132,
    "draft_swa": 4096,
    "indexer": 528,
    "mamba": 5003,
    "swa": 2048,
}
"""The page sizes of one model's pools: larger than the target's, smaller, and equal to it."""


@check("KV-102")
def pools_of_one_hash_coexist(case: Case) -> None:
    """Every pool of a model keeps its own page under one hash, whichever pool was opened first."""
    for order in (list(_POOLS), list(reversed(_POOLS))):
        store = case.open(case.subject.config(case.new_scratch()))
        pools = [_pool(case, name) for name in order]
        hashes = case.hashes(3)
        for pool in pools:
            open_and_set(case, store, pool, *hashes)
        for pool in pools:
            case.must_hold(store, pool, case.contents(pool, hashes))


@check("KV-102")
def a_pool_without_the_page_has_a_miss(case: Case) -> None:
    """A page of the target is not a page of the draft, and the other way round."""
    store = case.open()
    pools = [_pool(case, name) for name in _POOLS]
    for pool in pools:
        store.open_space(pool)
    for pool in pools:
        pages = case.stored(store, pool, 2)
        for other in pools:
            if other is not pool:
                why = f"was set in pool {pool.pool!r} only, not in {other.pool!r}"
                case.must_miss(store, other, list(pages), why)


@check("KV-102")
def what_is_done_to_the_draft_leaves_the_target(case: Case) -> None:
    """Setting a draft page again, or deleting it, does not change the target's page."""
    store = case.open()
    target, draft = _pool(case, "kv"), _pool(case, "draft")
    for one, other in ((target, draft), (draft, target)):
        hashes = case.hashes(4)
        open_and_set(case, store, one, *hashes)
        open_and_set(case, store, other, *hashes)
        open_and_set(case, store, other, *hashes[::2])
        store.delete(other, hashes[1:3])
        with note(f"pages of {other.pool!r} were set again and deleted, not of {one.pool!r}"):
            case.must_hold(store, one, case.contents(one, hashes))
        case.must_miss(store, other, hashes[1:3], f"was deleted in pool {other.pool!r}")
        case.must_hold(store, other, case.contents(other, [hashes[0], hashes[3]]))


def _pool(case: Case, name: str) -> KeySpace:
    return case.space(fitting(case, _POOLS[name]), pool=name)
