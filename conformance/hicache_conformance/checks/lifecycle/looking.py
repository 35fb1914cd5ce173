"""KV-308: a store that is opened read-only does not change, and claims the same."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotDeclared, NotVerified
from hicache_conformance.scenarios.setup import open_store
from hicache_conformance.scenarios.small_stores import SmallStore, small_store
from hicache_conformance.tools.observation.files import file_states
from hicache_conformance.tools.observation.pages_at_rest import OwnObject, at_rest
from hicache_storage.storage import Durability, describe

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import PageTimes

_PAGES = 6


@check("KV-308")
def looking_changes_nothing(case: Case) -> None:
    """Listing, reading and lookups through a read-only handle change no page, time of use or file."""
    _require_other_handles(case)
    store, space = open_store(case)
    pages = case.stored(store, space, _PAGES)
    case.must_hold(store, space, pages)
    store.close()
    before = _shown(case, space, list(pages))
    with _looking(case) as looker:
        _look(case, looker, space, pages)
    _must_show(case, space, before)


@check("KV-308")
def asking_for_what_is_not_there_makes_nothing(case: Case) -> None:
    """A read-only handle that opens a key space and looks up pages in it does not create it."""
    _require_other_handles(case)
    store, space = open_store(case)
    case.stored(store, space, 1)
    store.close()
    unknown = case.space(space.page_nbytes, tenant="asked for")
    hashes = case.hashes(2)
    with _looking(case) as looker:
        looker.open_space(unknown)
        case.must_miss(looker, unknown, hashes, "was never set")
        looker.storage.page_times(unknown, hashes)
        if case.claims.enumerable and looker.scan(unknown):
            raise looker.violation("a scan lists pages of a key space that is not there")
    again = case.open()
    if case.claims.enumerable and unknown in again.spaces():
        raise again.violation(
            "a key space is listed that was only opened read-only, never written",
            expected="no such key space: open_space prepares nothing",
            got=f"tenant {unknown.tenant!r} in spaces()",
        )


@check("KV-308")
def looking_at_a_full_store_evicts_nothing(case: Case) -> None:
    """Opened read-only, a store at its limits, or above limits lowered since, keeps every page."""
    _require_other_handles(case)
    small = _full_soon(case)
    taken, _ = small.fill()
    found = small.probe.get(small.space, list(taken))
    there = [page for page, data in zip(taken, found, strict=True) if data is not None]
    small.probe.close()
    before = _shown(case, small.space, there)
    config = dict(case.config)
    if isinstance(limit := config.get("capacity_nbytes"), int):
        lower = max(small.space.stored_nbytes * 2, limit // 4)
        case.reconfigure(capacity_nbytes=lower)
    with _looking(case) as looker:
        _look(case, looker, small.space, {page: taken[page] for page in there})
    case.reconfigure(**config)
    _must_show(case, small.space, before)


@check("KV-308")
def damage_stays_for_others_to_see(case: Case) -> None:
    """A read-only handle misses a page whose object was cut, and leaves the object unchanged."""
    _require_other_handles(case)
    store, space = open_store(case)
    pages = case.stored(store, space, 2)
    damaged = next(iter(pages))
    store.close()
    place = at_rest(case.subject, case.scratch.path, space, pages, damaged)
    if not isinstance(place, OwnObject):
        raise NotDeclared("a page has no object of its own that could be cut")
    place.write(place.read()[:-1])
    lying = place.read()
    with _looking(case) as looker:
        if looker.get(space, [damaged]) != [None]:
            raise looker.violation("batch_get is True for a page whose object was cut")
        list(looker.storage.faults(space))
        list(looker.storage.faults(space, list(pages)))
    if place.read() != lying:
        raise looker.violation(
            "a damaged object is gone or changed after a read-only handle has read it"
        )


@check("KV-308")
def a_read_only_handle_claims_the_same(case: Case) -> None:
    """A read-only handle claims what a writing one claims, so both frame pages in the same way."""
    store, _ = open_store(case)
    claimed = describe(store.storage.capabilities)
    store.close()
    looker = case.open_read_only()
    got = describe(looker.storage.capabilities)
    other = [name for name in claimed if got[name] != claimed[name]]
    if other:
        raise looker.violation(
            "a read-only handle claims something else than a handle that writes",
            expected=", ".join(f"{name} {claimed[name]}" for name in other),
            got=", ".join(f"{name} {got[name]}" for name in other),
        )


def _full_soon(case: Case) -> SmallStore:
    """Return a small store, if it evicts when it is full. End the check if it does not."""
    evicts_nothing = NotDeclared("the store evicts nothing when it is full")
    try:
        small = small_store(case)
    except NotVerified:
        if case.keeps:
            raise evicts_nothing from None
        raise
    if case.keeps:
        raise evicts_nothing
    return small


@dataclass(frozen=True, slots=True)
class _Shown:
    """Everything that a handle returns about some pages, except their bytes."""

    there: Mapping[str, bool]
    times: Sequence[PageTimes]
    listed: frozenset[str]

    @classmethod
    def of(cls, store: Probe, space: KeySpace, hashes: Sequence[str]) -> _Shown:
        """Return what `store` returns. The calls may come in any order, because none counts as a use."""
        listed = store.scan(space) if store.storage.capabilities.enumerable else []
        return cls(
            dict(zip(hashes, store.exists(space, hashes), strict=True)),
            store.storage.page_times(space, hashes),
            frozenset(info.page_hash for info in listed),
        )

    def unlike(self, other: _Shown) -> tuple[str, str]:
        """Return what each of two shows of the first page that differs."""
        pairs = zip(self._texts(), other._texts(), strict=True)
        return next((one, another) for one, another in pairs if one != another)

    def _texts(self) -> Iterator[str]:
        """Yield a text for each page, and one for other pages that are listed."""
        for (page, is_there), times in zip(self.there.items(), self.times, strict=True):
            listed = "listed" if page in self.listed else "not listed"
            yield f"{page[:8]}: exists {is_there}, {listed}, {times}"
        yield f"also listed: {', '.join(sorted(self.listed - self.there.keys())) or 'no page'}"


def _shown(case: Case, space: KeySpace, hashes: Sequence[str]) -> _Shown:
    """Return what a new handle returns. A handle may store times of use only when it is closed."""
    store = case.open()
    store.open_space(space)
    shown = _Shown.of(store, space, hashes)
    store.close()
    return shown


def _require_other_handles(case: Case) -> None:
    claims = case.claims
    if not claims.shared and claims.durability < Durability.CRASH:
        raise NotDeclared("pages end with their handle, so another handle finds nothing")


@contextmanager
def _looking(case: Case) -> Generator[Probe, None, None]:
    """Yield a read-only handle, then check that no file under the test's directory has changed."""
    before = file_states(case.scratch.path)
    looker = case.open_read_only()
    yield looker
    looker.close()
    after = file_states(case.scratch.path)
    changed = sorted(
        str(path.relative_to(case.scratch.path))
        for path in before.keys() | after.keys()
        if before.get(path) != after.get(path)
    )
    if changed:
        raise looker.violation(
            "reading changed files of the store",
            expected="the same files, with the same bytes and times",
            got=f"{len(changed)} that differ: {', '.join(changed[:3])}",
        )


def _look(case: Case, looker: Probe, space: KeySpace, pages: Mapping[str, bytes]) -> None:
    """Make the calls of a program that only looks. Every page must be found."""
    storage, hashes = looker.storage, list(pages)
    looker.open_space(space)
    if storage.capabilities.enumerable:
        missing = set(hashes) - {info.page_hash for info in looker.scan(space)}
        if space not in looker.spaces() or missing:
            raise looker.violation(
                "a read-only handle does not list what is there",
                got=f"{len(missing)} pages are missing",
            )
    for _ in range(2):
        case.must_hold(looker, space, pages)
        case.must_miss(looker, space, case.hashes(1), "was never set")
    storage.page_times(space, hashes)
    list(storage.faults(space))
    list(storage.faults(space, hashes))
    list(storage.unreadable_spaces())
    storage.diagnose()
    storage.stats()


def _must_show(case: Case, space: KeySpace, before: _Shown) -> None:
    after = _shown(case, space, list(before.there))
    again = case.open()
    if after != before and not case.forgets(again):
        expected, got = before.unlike(after)
        raise again.violation(
            "pages or their times have changed after the store was only read",
            expected=expected,
            got=got,
        )
