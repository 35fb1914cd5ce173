"""KV-010: when a page was written and last used. `hicache gc` decides by these times."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotDeclared
from hicache_conformance.scenarios.setup import open_store
from hicache_storage.storage import PageTimes

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_CLOCKS_S = 86_400.0
"""The clock of a store may differ from this machine's by a day. A wrong unit differs by more."""
_GRAIN_S = 2.0
"""The checks wait for clocks whose steps are at most this long."""
_POLL_S = 0.01
_ZONES = ("EAST-11", "WEST+11")
"""Time zones, as in the variable TZ. Local time differs by 22 hours between them."""


@check("KV-010")
def times_follow_the_hashes(case: Case) -> None:
    """`page_times` returns the times of pages in the order of the hashes, and none for absent pages."""
    store, space = open_store(case)
    first, second = case.stored(store, space, 2)
    alone = {one: _times(store, space, [one])[0] for one in (first, second)}
    absent = case.hashes(2)
    asked = [absent[0], second, absent[1], first, second]
    for page_hash, times in zip(asked, _times(store, space, asked), strict=True):
        expected = alone.get(page_hash, PageTimes())
        if times != expected:
            raise store.violation(
                f"page_times gives a {'page' if page_hash in alone else 'page that is absent'} the"
                " times of another",
                expected=str(expected),
                got=f"{times} for {page_hash[:8]}",
            )


@check("KV-010")
def a_page_just_set_was_written_just_now(case: Case) -> None:
    """The times of a page that was just set are about now, and its last use is not before its write."""
    store, space = open_store(case)
    pages = case.stored(store, space, 2)
    case.must_hold(store, space, pages)
    now_s = time.time()
    found = _times(store, space, list(pages))
    for page_hash, times in zip(pages, found, strict=True):
        for name in ("written_at_s", "used_at_s"):
            at_s = getattr(times, name)
            if at_s is not None and abs(at_s - now_s) > _CLOCKS_S:
                raise store.violation(
                    f"{name} of a page that was set a moment ago is not about now",
                    expected=f"{now_s:.0f}, in seconds since 1970",
                    got=f"{at_s} for {page_hash[:8]}",
                )
        if times.used_at_s is not None and times.used_at_s < (times.written_at_s or 0) - _GRAIN_S:
            raise store.violation(
                "a page was used before it was written",
                expected="used_at_s, which a set moves too, at written_at_s or later",
                got=f"{times} for {page_hash[:8]}",
            )


@check("KV-010")
def a_get_is_a_use_and_asking_is_none(case: Case) -> None:
    """A get moves the time of the last use of each page that it returns. `page_times` moves none."""
    store, space = open_store(case)
    pages = case.stored(store, space, 4)
    before = _some_time_later(store, space, list(pages))
    (unread, _), *got = pages.items()
    case.must_hold(store, space, dict(got))
    _must_move_all_but(case, store, space, before, other=unread, what="get")


@check("KV-010")
def setting_a_present_page_is_a_use(case: Case) -> None:
    """A set of present pages moves the time of their last use, and the times of no other page."""
    store, space = open_store(case)
    pages = case.stored(store, space, 4)
    before = _some_time_later(store, space, list(pages))
    (unset, _), *again = pages.items()
    case.must_set(store, space, dict(again))
    _must_move_all_but(case, store, space, before, other=unset, what="set of present pages")


@check("KV-010")
def times_are_the_same_in_every_time_zone(case: Case) -> None:
    """The times of a page are seconds since 1970, whatever time zone the process sets or asks in."""
    store, space = open_store(case)
    began_s = time.monotonic()
    pages: list[str] = []
    for zone in _ZONES:
        with _time_zone(zone):
            pages += case.stored(store, space, 1)
    found: list[PageTimes] = []
    for zone in _ZONES:
        with _time_zone(zone):
            found += _times(store, space, pages)
    if all(times == PageTimes() for times in found):
        raise NotDeclared("the store does not record the times of pages")
    most_s = time.monotonic() - began_s + _GRAIN_S
    for name in ("written_at_s", "used_at_s"):
        known = [at_s for at_s in (getattr(times, name) for times in found) if at_s is not None]
        if known and max(known) - min(known) > most_s:
            raise store.violation(
                f"{name} depends on the time zone of the process",
                expected=f"times at most {most_s:.0f} s apart, because both pages were set just now",
                got=f"{max(known) - min(known):.0f} s apart, in TZ={' and TZ='.join(_ZONES)}",
            )


@contextmanager
def _time_zone(zone: str) -> Generator[None, None, None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = zone
    time.tzset()
    try:
        yield
    finally:
        if before is None:
            del os.environ["TZ"]
        else:
            os.environ["TZ"] = before
        time.tzset()


def _some_time_later(store: Probe, space: KeySpace, hashes: Sequence[str]) -> dict[str, PageTimes]:
    """Return the times of pages, once a use now would give other ones.

    Raises:
        NotDeclared: The store does not note each use.
    """
    before = _times(store, space, hashes)
    if before[0].used_at_s is None:
        raise NotDeclared("the store does not record when a page was used")
    if before[0].used_within_s > _GRAIN_S:
        raise NotDeclared(f"the store notes a use every {before[0].used_within_s:g} s only")
    _pass_time(store, space, hashes, before)
    return dict(zip(hashes, before, strict=True))


def _must_move_all_but(
    case: Case,
    store: Probe,
    space: KeySpace,
    before: Mapping[str, PageTimes],
    *,
    other: str,
    what: str,
) -> None:
    after = dict(zip(before, _times(store, space, list(before)), strict=True))
    if case.forgets(store):
        return
    for used in before.keys() - {other}:
        if not (after[used].used_at_s or 0) > (before[used].used_at_s or 0):
            raise store.violation(
                f"a {what} does not move the time of the last use of each",
                expected=f"later than {before[used].used_at_s}",
                got=f"{after[used].used_at_s} for {used[:8]}",
            )
    if after[other] != before[other]:
        raise store.violation(
            f"the {what} moved the times of another",
            expected=str(before[other]),
            got=f"{after[other]} for {other[:8]}",
        )


def _pass_time(
    store: Probe, space: KeySpace, hashes: Sequence[str], before: Sequence[PageTimes]
) -> None:
    """Ask for times repeatedly, until a use now would give another time. The answers must not change."""
    until_s = time.monotonic() + _GRAIN_S + before[0].used_within_s
    while time.monotonic() < until_s:
        time.sleep(_POLL_S)
        again = _times(store, space, hashes)
        if again != before:
            raise store.violation(
                "asking for the times of pages changed them: it counts as a use",
                expected=str(before[0]),
                got=str(again[0]),
            )
        if _is_fine(before) and time.monotonic() > until_s - _GRAIN_S + 10 * _POLL_S:
            return


def _is_fine(times: Sequence[PageTimes]) -> bool:
    """Return True if the store's clock shows fractions of a second."""
    return any(one.used_at_s is not None and one.used_at_s % 1 for one in times)


def _times(store: Probe, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
    """Return the answer of `page_times`, after checking its form."""
    answer: object = store.attempt(
        "page_times", space, hashes, lambda: store.storage.page_times(space, hashes)
    )
    given = cast("list[object]", answer) if isinstance(answer, list) else []
    times = [one for one in given if isinstance(one, PageTimes)]
    if not len(times) == len(given) == len(hashes):
        raise store.violation(
            "page_times must return a PageTimes for each hash",
            expected=f"a list of {len(hashes)} PageTimes",
            got=f"{type(answer).__name__} of {len(times)}",
        )
    return times
