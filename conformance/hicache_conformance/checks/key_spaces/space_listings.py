"""KV-104: `spaces` lists exactly the key spaces that hold pages, on every handle."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from hicache_conformance.case import retention_baseline
from hicache_conformance.checks import check
from hicache_conformance.checks.key_spaces.listings import must_list, none_of
from hicache_conformance.rules import Need
from hicache_conformance.run.outcomes import NotDeclared
from hicache_conformance.scenarios.key_space_neighbours import neighbours, rich_space
from hicache_conformance.scenarios.setup import (
    NAMES_TENANT,
    another_handle,
    fitting,
    note,
    open_and_set,
    remove_space,
    stores_named,
)
from hicache_conformance.tools.observation.files import regular_files
from hicache_storage.keys import KeySpace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe

_MANY_SPACES = 1050
_OPENING_S = 8.0
_MOST_SPACES = 100_000
_KITS_OWN_TENANTS = ("alive", retention_baseline.TENANT, NAMES_TENANT)
"""The tenants of the key spaces that the kit opens for its own use."""


@check("KV-104")
def another_handle_lists_the_same(case: Case) -> None:
    """Another handle lists the pages and key spaces that the first one left."""
    store = case.open()
    spaces = _varied_spaces(case)
    hashes = case.hashes(3)
    for space in spaces:
        open_and_set(case, store, space, *hashes)
    store.delete(spaces[0], hashes[:1])
    again = another_handle(case, store)
    with note("by a handle that has opened none of them"):
        must_list_spaces(case, again, spaces, hashes[1])
    for space in spaces:
        again.open_space(space)
        must_list(case, again, space, hashes[1:] if space is spaces[0] else hashes)


@check("KV-104")
def each_store_lists_its_own(case: Case) -> None:
    """A store lists its own key spaces, and none of a store whose name begins like its own."""
    name = case.scratch.prefix
    stores = stores_named(case, name, f"{name}7")
    space = case.space(fitting(case, 96))
    hashes = case.hashes(1)
    opened: list[Probe] = []
    for store in reversed(list(stores.values())):
        with note("it is in another store only"):
            must_list_spaces(case, store, [], hashes[0])
        open_and_set(case, store, space, *hashes)
        opened.append(store)
        with note("another store of this process has it, too"):
            for one in opened:
                must_list_spaces(case, one, [space], hashes[0])


@check("KV-104", Need.SHARED)
def a_damaged_manifest_hides_no_other_key_space(case: Case) -> None:
    """If the file that describes a key space is damaged, another handle still lists the others."""
    spaces, _ = _with_a_damaged_manifest(case)
    again = case.open()
    listed = {space.id for space in again.spaces()}
    lacking = {space.id for space in spaces[1:]} - listed
    none_of(again, "spaces() leaves out a key space that holds pages", lacking)


@check("KV-103", Need.SHARED)
def a_key_space_whose_manifest_is_damaged_can_be_removed(case: Case) -> None:
    """If the file that describes a key space is damaged, `remove_space` still removes its pages."""
    remove_space(case.open(), "0" * 32)
    (damaged, *_), hashes = _with_a_damaged_manifest(case)
    again = case.open()
    removed = remove_space(again, damaged.id)
    if any(again.exists(damaged, hashes)):
        raise again.violation(
            "remove_space leaves the pages of a key space whose manifest is damaged",
            expected="no page: a key space of either kind is removed",
            got=f"{removed}, and its pages are there",
        )


def _with_a_damaged_manifest(case: Case) -> tuple[list[KeySpace], list[str]]:
    """Store the same pages in three key spaces, and damage the manifest of the first.

    Raises:
        NotDeclared: The store describes no key space in a file of its own.
    """
    store = case.open()
    tenants = ("first", "second", "third")
    spaces = [case.space(fitting(case, 64), tenant=tenant) for tenant in tenants]
    hashes = case.hashes(2)
    for space in spaces:
        open_and_set(case, store, space, *hashes)
    found = [path for path in regular_files(case.scratch.path) if _describes(path, spaces[0])]
    if not found:
        raise NotDeclared("the store describes no key space in a file of its own")
    for path in found:
        path.write_bytes(b"{")
    return spaces, hashes


def _describes(path: Path, space: KeySpace) -> bool:
    """Return whether a file holds the manifest of a key space as the contract's JSON."""
    try:
        return KeySpace.from_manifest(json.loads(path.read_bytes())) == space
    except (OSError, ValueError, TypeError):
        return False


@check("KV-104", Need.DURABLE)
def listings_survive_closing(case: Case) -> None:
    """If all handles of a durable store are closed, the next one lists its key spaces and pages."""
    store = case.open()
    spaces = _varied_spaces(case)[:4]
    hashes = case.hashes(3)
    for space in spaces:
        open_and_set(case, store, space, *hashes)
    store.close()
    again = case.open(label="reopened")
    must_list_spaces(case, again, spaces, hashes[0])
    for space in spaces:
        again.open_space(space)
        must_list(case, again, space, hashes)


@check("KV-104")
def every_key_space_is_listed_once(case: Case) -> None:
    """`spaces()` lists each key space that holds pages once, with every field, and no others."""
    store = case.open()
    spaces = _varied_spaces(case)
    (page_hash,) = case.hashes(1)
    for space in spaces:
        open_and_set(case, store, space, page_hash)
        store.open_space(space)
    must_list_spaces(case, store, spaces, page_hash)


@check("KV-104", quick=False)
def many_key_spaces_are_listed(case: Case) -> None:
    """Each of more than a thousand key spaces keeps its page and is listed once."""
    store = case.open()
    many = _MANY_SPACES // 10 if case.quick else _MANY_SPACES
    until_s = time.monotonic() + _OPENING_S
    (page_hash,) = case.hashes(1)
    spaces: list[KeySpace] = []
    while len(spaces) < many and time.monotonic() < until_s:
        spaces.append(case.space(fitting(case, 32), revision=f"{len(spaces)}"))
        open_and_set(case, store, spaces[-1], page_hash)
    case.evidence["key spaces"] = f"{len(spaces)} of {many}"
    must_list_spaces(case, store, spaces, page_hash)
    for space in (*spaces[:20], *spaces[-20:]):
        with note(f"{len(spaces)} key spaces were opened"):
            case.must_hold(store, space, case.contents(space, [page_hash]))


@check("KV-104")
def key_spaces_are_listed_while_others_open(case: Case) -> None:
    """A listing of key spaces is complete even if more key spaces are opened and filled meanwhile."""
    store = case.open()
    first = [case.space(fitting(case, 64), revision=f"first{number}") for number in range(12)]
    later = [replace(space, tenant="later") for space in first]
    (page_hash,) = case.hashes(1)
    for space in first:
        open_and_set(case, store, space, page_hash)
    waiting = list(later)
    found: list[KeySpace] = []
    for space in islice(store.listing_spaces(), _MOST_SPACES):
        found.append(space)
        if waiting:
            open_and_set(case, store, waiting.pop(), page_hash)
    with note("others were opened and filled between two steps of the listing"):
        _must_agree_on_spaces(case, store, found, first, page_hash, others=later)
    opened = [*first, *(space for space in later if space not in waiting)]
    must_list_spaces(case, store, opened, page_hash)


@check("KV-104")
def a_cleared_key_space_is_listed_again(case: Case) -> None:
    """After a key space was cleared or emptied, it is listed again as soon as it holds pages."""
    store = case.open()
    spaces = _varied_spaces(case)[:3]
    (page_hash,) = case.hashes(1)
    for space in spaces:
        open_and_set(case, store, space, page_hash)
    store.clear(spaces[0])
    store.delete(spaces[1], [page_hash])
    for space in spaces[:2]:
        case.must_set(store, space, case.contents(space, [page_hash]))
    must_list_spaces(case, store, spaces, page_hash)


def must_list_spaces(case: Case, store: Probe, spaces: Sequence[KeySpace], page_hash: str) -> None:
    """Raise unless the store lists each of `spaces`, which hold this page, once, and no others."""
    _must_agree_on_spaces(case, store, store.spaces(), spaces, page_hash)


def _must_agree_on_spaces(
    case: Case,
    store: Probe,
    listed: Sequence[KeySpace],
    spaces: Sequence[KeySpace],
    page_hash: str,
    *,
    others: Sequence[KeySpace] = (),
) -> None:
    found = Counter(listed)
    known = {*spaces, *others}
    unexpected = [f"{space}" for space in found if _is_ours(case, space) and space not in known]
    none_of(store, "spaces() lists a key space that was never opened", unexpected)
    doubled = [f"{space}" for space in spaces if found[space] > 1]
    none_of(store, "spaces() lists a key space twice", doubled)
    for space in spaces:
        if space not in found:
            store.open_space(space)
            if store.exists(space, [page_hash]) == [True]:
                none_of(store, "spaces() does not list a key space that holds pages", [f"{space}"])
            case.must_hold(store, space, case.contents(space, [page_hash]))


def _is_ours(case: Case, space: KeySpace) -> bool:
    """Return True if a listed key space must come from this check, even if one field is wrong."""
    token = case.scratch.prefix[:-1]
    return token in space.model.lower() and space.tenant not in _KITS_OWN_TENANTS


def _varied_spaces(case: Case) -> list[KeySpace]:
    """Return key spaces that together vary every field, some with letters outside ASCII."""
    whole = fitting(case, 96)
    base = rich_space(case.space(whole - whole // 4, frame_nbytes=whole // 4))
    name = f"{base.model}/模型 é"
    odd = replace(base, model=name, tenant="équipe/1", revision="v1.0 (main)")
    return [base, odd, *(one.space for one in neighbours(base, quick=True))]
