"""KV-205: a store borrows pages for the call only."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hicache_conformance.checks import check
from hicache_conformance.scenarios.attempts import make_attempt
from hicache_conformance.scenarios.fault_path import open_fault_path
from hicache_conformance.scenarios.setup import fitting, note, open_store
from hicache_conformance.tools.content.memory import is_overwritten, overwrite
from hicache_conformance.tools.network.proxy import FaultProxy
from hicache_conformance.tools.processes.resources import wait_until
from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_conformance.tools.content.memory import PageMemory
    from hicache_storage.keys import KeySpace

_SIZES = (64, 5000, 300_000, 4 << 20)
"""The largest is one that a store may be tempted to keep without a copy."""
_LARGE_NBYTES = 1 << 20
_WATCHED_S = 0.4
"""How long memory is watched after a call. Most work of other threads has ended by then."""
_FREED_WITHIN_S = 5.0
_CALL_LIMIT_S = 60.0


@check("KV-205")
def memory_may_be_reused_after_a_set(case: Case) -> None:
    """After `batch_set` returned, a store does not store what the caller then writes into the memory."""
    store = case.open()
    written: dict[KeySpace, dict[str, bytes]] = {}
    for nbytes in _SIZES:
        space = case.space(fitting(case, nbytes))
        store.open_space(space)
        for segments in (1, 5):
            pages = case.contents(space, case.hashes(3))
            memory = _set_from(store, space, pages, segments)
            if memory is not None:
                overwrite(memory.pages)
                written.setdefault(space, {}).update(pages)
                with note("the memory it was set from was reused after the call"):
                    case.must_hold(store, space, pages)
    time.sleep(_WATCHED_S / 4)  # The store may copy the page later.
    for space, pages in written.items():
        with note("the memory it was set from was reused after the call"):
            case.must_hold(store, space, pages)


@check("KV-205")
def memory_may_be_reused_after_a_get(case: Case) -> None:
    """After `batch_get` returned, no read returns what the caller then writes into the memory."""
    store = case.open()
    for nbytes in _SIZES:
        space = case.space(fitting(case, nbytes))
        store.open_space(space)
        pages = case.contents(space, case.hashes(2))
        if all(store.set(space, pages)):
            for segments in (1, 4):
                for page_hash in pages:
                    memory = store.memory(space, 1, segments)
                    store.batch_get(space, [page_hash], memory.pages)
                    overwrite(memory.pages)
                with note("the memory it was last read into was reused after the call"):
                    case.must_hold(store, space, pages)


@check("KV-205")
def no_call_keeps_its_pages(case: Case) -> None:
    """After a call returned, the store keeps no reference to the memory of its pages."""
    store, space = open_store(case, 5000)
    kept: dict[str, weakref.ref[object]] = {}
    pages = case.contents(space, case.hashes(4))
    for page_hash, data in pages.items():
        kept[f"batch_set of {page_hash[:8]}"] = _given_to_set(store, space, page_hash, data)
    for page_hash in (*pages, *case.hashes(2)):
        kept[f"batch_get of {page_hash[:8]}"] = _given_to_get(store, space, page_hash)

    def is_free() -> bool:
        store.exists(space, list(pages))  # A call may release what the call before it kept.
        gc.collect()
        return not any(memory() is not None for memory in kept.values())

    if not wait_until(is_free, _FREED_WITHIN_S):
        still = [call for call, memory in kept.items() if memory() is not None]
        raise store.violation(
            f"{still[0].split(' of ')[0]} keeps references to the pages that it was given",
            expected="none: memory is borrowed for the call only",
            got=f"{len(still)} of {len(kept)} pages are kept, of {still[0]}, ...",
        )


@check("KV-205")
def nothing_is_written_after_a_get(case: Case) -> None:
    """After `batch_get` returned, no byte of its pages changes, neither of hits nor of misses."""
    store = case.open()
    watched: list[PageMemory] = []
    for nbytes in _SIZES:
        space = case.space(fitting(case, nbytes))
        store.open_space(space)
        pages = case.contents(space, case.hashes(4))
        store.set(space, pages)
        for hashes in (list(pages), case.hashes(4), [*list(pages)[:2], *case.hashes(2)]):
            memory = store.memory(space, len(hashes))
            step = store.most_pages(space)
            for start in range(0, len(hashes), step):
                part = slice(start, start + step)
                store.batch_get(space, hashes[part], memory.pages[part])
            overwrite(memory.pages)
            watched.append(memory)
    _must_stay_unwritten(store, watched, "batch_get returned")


@check("KV-205")
def nothing_is_written_after_a_get_that_raised(case: Case) -> None:
    """After `batch_get` raised, no byte of its pages changes, because all its work has ended.

    The call fails at a page that can't be written to.
    """
    store, space = open_store(case, _LARGE_NBYTES)
    count = min(8, store.most_pages(space))
    pages = case.contents(space, case.hashes(count))
    store.set(space, pages)
    watched: list[PageMemory] = []
    for place in dict.fromkeys((0, count // 2)):
        memory = store.memory(space, count)
        given = list(memory.pages)
        given[place] = Page(*(part.toreadonly() for part in given[place].segments))
        call = partial(store.storage.batch_get, space, list(pages), given)
        make_attempt(
            store, "batch_get", call, limit_s=_CALL_LIMIT_S, detail="one page is read-only"
        )
        overwrite(memory.pages)
        watched.append(memory)
    _must_stay_unwritten(
        store, watched, "batch_get raised: one of its pages could not be written to"
    )


@check("KV-205")
def nothing_is_written_after_a_get_that_timed_out(case: Case) -> None:
    """If a reply comes after `batch_get` gave up, the store does not write it into the pages."""
    with open_fault_path(case) as path:
        caller = path.caller()
        pages = path.stored_pages(caller, 4)
        store, memory = caller.probe, caller.probe.memory(path.space, len(pages))
        hashes = list(pages)[: store.most_pages(path.space)]
        path.on_all(partial(FaultProxy.go_silent, direction="down"))
        call = partial(store.storage.batch_get, path.space, hashes, memory.pages[: len(hashes)])
        make_attempt(store, "batch_get", call, limit_s=caller.limit_s)
        overwrite(memory.pages)
        path.on_all(FaultProxy.pass_through)
        _must_stay_unwritten(store, [memory], "batch_get raised, and the server answered after all")
        path.answer_of(lambda: caller.get(hashes))
        _must_stay_unwritten(store, [memory], "a later batch_get of the same pages")


@check("KV-205")
def nothing_is_stored_after_a_set_that_timed_out(case: Case) -> None:
    """After `batch_set` gave up, a store does not store what the caller then writes into the memory."""
    with open_fault_path(case) as path:
        caller = path.caller()
        path.stored_pages(caller, 1)
        store = caller.probe
        pages = case.contents(path.space, case.hashes(min(4, store.most_pages(path.space))))
        memory = store.memory(path.space, len(pages)).filled_with(list(pages.values()))
        path.on_all(FaultProxy.go_silent)
        call = partial(store.storage.batch_set, path.space, list(pages), memory.pages)
        make_attempt(store, "batch_set", call, limit_s=caller.limit_s)
        overwrite(memory.pages)
        path.on_all(FaultProxy.pass_through)
        until_s = time.monotonic() + _WATCHED_S
        while time.monotonic() < until_s:
            for page_hash, data in pages.items():
                (read,) = path.answer_of(partial(caller.get, [page_hash]))
                if read not in (None, data):
                    with note("its set had timed out, and its memory was reused after that"):
                        raise case.wrong_bytes(store, path.space, page_hash, read, [data])


def _set_from(
    store: Probe, space: KeySpace, pages: dict[str, bytes], segments: int
) -> PageMemory | None:
    """Set pages and return their memory, or None if the store has no room for them."""
    memory = store.memory(space, len(pages), segments).filled_with(list(pages.values()))
    hashes = list(pages)
    verdicts: list[bool] = []
    step = store.most_pages(space)
    for start in range(0, len(hashes), step):
        part = slice(start, start + step)
        verdicts += store.batch_set(space, hashes[part], memory.pages[part])
    return memory if all(verdicts) else None


def _given_to_set(
    store: Probe, space: KeySpace, page_hash: str, data: bytes
) -> weakref.ref[object]:
    memory = np.frombuffer(data, dtype=np.uint8).copy()
    store.batch_set(space, [page_hash], [Page(memory)])
    return weakref.ref(memory)


def _given_to_get(store: Probe, space: KeySpace, page_hash: str) -> weakref.ref[object]:
    memory = np.zeros(space.stored_nbytes, dtype=np.uint8)
    store.batch_get(space, [page_hash], [Page(memory)])
    return weakref.ref(memory)


def _must_stay_unwritten(store: Probe, watched: Sequence[PageMemory], when: str) -> None:
    """Overwrite memory after a call and watch it. Nobody else may write into it."""
    until_s = time.monotonic() + _WATCHED_S
    while True:
        ended = time.monotonic() > until_s
        for memory in watched:
            if any(not is_overwritten(page) for page in memory.pages):
                raise store.violation(
                    f"memory was written to after {when}",
                    expected="pages are borrowed for the call: no byte of them changes after it",
                    got="bytes of the next user of the memory were overwritten",
                )
        if ended:
            return
        time.sleep(_WATCHED_S / 20)
