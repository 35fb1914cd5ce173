"""KV-006: a page whose set returned False never shows, whatever is called later."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotVerified, Violation
from hicache_conformance.scenarios.attempts import Caller
from hicache_conformance.scenarios.setup import fitting, no_files, note, nothing_refused, open_store
from hicache_conformance.scenarios.small_stores import make_small
from hicache_conformance.tools.content.content import content
from hicache_conformance.tools.observation.files import files_under
from hicache_conformance.tools.processes.resources import file_size_limit
from hicache_storage.storage import Durability

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_conformance.tools.processes.child import Link
    from hicache_storage.keys import KeySpace

_PAGE_NBYTES = 32 << 10
_CAPACITY_NBYTES = 256 << 10
_OFFERED_NBYTES = 2 << 20
"""How many bytes are offered to a store without a capacity field, which may refuse some of them."""
_MOST_PAGES = 512
_BATCHES = 8
_SETTLED_AFTER_S = 0.5
"""After this time, most background work of a set has ended."""
_ANSWER_LIMIT_S = 120.0
_WHY = "was refused: batch_set returned False"


@check("KV-006")
def a_page_that_has_no_room_never_shows(case: Case) -> None:
    """A page that a full store refused is not there: not at once, not later, not when there is room."""
    store, space = _open_small_store(case)
    taken: dict[str, bytes] = {}
    refused: list[str] = []
    step = min(_OFFERED_NBYTES // space.stored_nbytes, _MOST_PAGES) // _BATCHES
    for _ in range(_BATCHES):
        offered = case.contents(space, case.hashes(step))
        for page_hash, ok in zip(offered, store.set(space, offered), strict=True):
            if ok:
                taken[page_hash] = offered[page_hash]
            else:
                refused.append(page_hash)
        case.must_miss(store, space, refused[-step:], _WHY)
    if not refused:
        raise nothing_refused(case)
    case.evidence["pages refused"] = str(len(refused))
    _must_stay_out(case, store, space, taken, refused)


@check("KV-006")
def bytes_that_have_no_room_never_show(case: Case) -> None:
    """If a full store refuses new bytes for a present page, the page keeps its old bytes or is gone."""
    store, space = _open_small_store(case)
    hashes = case.hashes(min(2 * _CAPACITY_NBYTES // space.stored_nbytes, _MOST_PAGES))
    old, new = (case.contents(space, hashes, version) for version in (0, 1))
    taken = dict(zip(hashes, store.set(space, old), strict=True))
    verdicts = store.set(space, new)
    refused = [h for h, ok in zip(hashes, verdicts, strict=True) if not ok]
    if not refused:
        raise nothing_refused(case)
    store.delete(space, [h for h in hashes if h not in refused])
    for page_hash, data in zip(refused, store.get(space, refused), strict=True):
        if data is not None and not (taken[page_hash] and data == old[page_hash]):
            raise store.violation(
                "batch_set was refused, and its bytes can be read",
                expected="a miss" + (", or the bytes set before" if taken[page_hash] else ""),
                got=f"{page_hash[:8]}: {case.diagnosed(space, page_hash, data, [])}",
                sequence=store.trace.sequence(page_hash[:8]),
            )


@check("KV-006", quick=False)
def a_page_that_the_file_system_refused_never_shows(case: Case) -> None:
    """A page whose file could not be written never shows, not even when files can be written again."""
    space = case.space(fitting(case, _PAGE_NBYTES))
    if not _writes_files(case, space):
        raise no_files(case)
    hashes = case.hashes(3)
    try:
        refused: list[str] = case.child(_set_on_a_full_disk, space, hashes).receive(_ANSWER_LIMIT_S)
    except EOFError:
        raise Violation(
            "the process ended when the store could not write its files",
            "False for the page, or StorageUnavailable",
            "the end of the process, by a signal or an exit",
            ("batch_set of one page, with RLIMIT_FSIZE below its size",),
        ) from None
    if not refused:
        raise NotVerified("no set returned False when files could not grow")
    if case.claims.durability >= Durability.CRASH:
        again = case.open()
        again.open_space(space)
        case.must_miss(again, space, refused, f"{_WHY} in another process")


def _set_on_a_full_disk(link: Link, space: KeySpace, hashes: list[str]) -> None:
    """Actor: set pages while files can't grow. Send the refused ones, none of which may show later."""
    store = link.open()
    store.open_space(space)
    caller = Caller(store, space, _ANSWER_LIMIT_S)
    nbytes = space.stored_nbytes
    pages = {page_hash: content(space.id, page_hash, nbytes) for page_hash in hashes}
    refused: list[str] = []
    for (page_hash, data), limit in zip(pages.items(), (0, nbytes // 2, nbytes - 1), strict=True):
        with file_size_limit(limit):
            attempt = caller.set({page_hash: data})  # Another rule judges exceptions.
        refused += [page_hash] if attempt.answer == [False] else []
    for _ in range(2):
        found = store.exists(space, refused)
        read = [data is not None for data in store.get(space, refused)]
        visible = [h for h, *seen in zip(refused, found, read, strict=True) if any(seen)]
        if visible:
            raise store.violation(
                f"a page {_WHY}, and shows once files can be written again",
                expected="a miss",
                got=f"a hit for {visible[0][:8]}",
            )
        others = [f"{os.getpid():032x}{number:032x}" for number in range(3)]
        store.set(space, {one: content(space.id, one, nbytes) for one in others})
        store.delete(space, others)
    store.close()
    link.send(refused)


def _must_stay_out(
    case: Case, store: Probe, space: KeySpace, taken: dict[str, bytes], refused: list[str]
) -> None:
    """Make room, set other pages, wait and reopen the store. No refused page may show."""
    to_delete = list(taken)[: len(taken) // 2 + 1]
    store.delete(space, to_delete)
    case.must_miss(store, space, refused, f"{_WHY}, before others were deleted")
    fresh = case.contents(space, case.hashes(1))
    store.set(space, fresh)
    store.delete(space, [*taken, *fresh])
    until_s = time.monotonic() + _SETTLED_AFTER_S
    while time.monotonic() < until_s:
        case.must_miss(store, space, refused[:4], f"{_WHY}, a while ago")
        time.sleep(_SETTLED_AFTER_S / 10)
    case.must_miss(store, space, refused, f"{_WHY}, before there was room again")
    if case.claims.durability >= Durability.CRASH:
        store.close()
        again = case.open()
        again.open_space(space)
        case.must_miss(again, space, refused, f"{_WHY}, before the store was closed and opened")


def _open_small_store(case: Case) -> tuple[Probe, KeySpace]:
    """Open a key space in a store that is soon full, if a field of its config limits the capacity."""
    room_nbytes = _MOST_PAGES // 2 * fitting(case, _PAGE_NBYTES)
    with suppress(NotVerified):  # A store that stays large may refuse pages too.
        make_small(case, min(_CAPACITY_NBYTES, room_nbytes))
    store, space = open_store(case, _PAGE_NBYTES)
    return store, space


def _writes_files(case: Case, space: KeySpace) -> bool:
    before = _nbytes_under(case.scratch.path)
    store = case.open()
    with note("nothing limits it yet"):
        store.open_space(space)
        case.stored(store, space, 1)
    store.close()  # A store that is not shared may allow only one handle at a time.
    return _nbytes_under(case.scratch.path) - before >= space.stored_nbytes


def _nbytes_under(path: Path) -> int:
    return sum(files_under(path).values())
