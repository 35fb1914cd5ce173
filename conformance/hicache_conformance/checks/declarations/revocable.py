"""KV-901: once the memory of a page was revoked, a call of a revocable store no longer touches it."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.scenarios.setup import fitting, note
from hicache_conformance.tools.content.memory import is_overwritten, overwrite
from hicache_conformance.tools.processes.threads import HeldCall, Threads
from hicache_storage.backend_support.revocable import AtomicRevocable
from hicache_storage.errors import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_conformance.tools.content.memory import PageMemory
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

_HELD_NBYTES = 64 << 10
_HELD_PAGES = 4
_LARGE_NBYTES = 1 << 20
_LARGE_PAGES = 16
_ATTEMPTS = 8
_REVOKED_WITHIN_S = 1.0
_CLAIM = "revocable is declared, and "


@check("KV-901", Need.REVOCABLE)
def a_page_that_was_revoked_is_neither_read_nor_stored(case: Case) -> None:
    """A page that was revoked before the call is a miss, keeps its bytes, and is not stored."""
    store = case.open()
    space = case.space(fitting(case, _HELD_NBYTES))
    store.open_space(space)
    pages = case.stored(store, space, 2)
    memory = store.memory(space, 2, 3)
    memory.pages[1].revocable = _revoked()
    overwrite(memory.pages)
    if True in store.batch_get(space, list(pages), memory.pages)[1:]:
        raise store.violation(f"{_CLAIM}batch_get says True for a page that was revoked before")
    if not is_overwritten(memory.pages[1]):
        raise store.violation(f"{_CLAIM}batch_get wrote into a page that was revoked before")
    fresh = case.contents(space, case.hashes(2))
    memory = store.memory(space, 2, 3).filled_with(list(fresh.values()))
    memory.pages[0].revocable = _revoked()
    first, second = list(fresh)
    if store.batch_set(space, [first, second], memory.pages)[0]:
        raise store.violation(f"{_CLAIM}batch_set says True for a page that was revoked before")
    case.must_miss(store, space, [first], "was revoked before it was set")


@check("KV-901", Need.REVOCABLE)
def a_get_writes_nothing_after_the_revoke(case: Case) -> None:
    """If pages are revoked while `batch_get` runs, none of their bytes changes afterwards."""
    store = case.open()
    space = case.space(fitting(case, _HELD_NBYTES))
    store.open_space(space)
    pages = case.stored(store, space, min(_HELD_PAGES, store.most_pages(space)))
    memory = store.memory(space, len(pages), 8)
    _revoke_in_a_held_call(memory, partial(store.storage.batch_get, space, list(pages)))
    _must_stay_unwritten(store, memory)
    large, many = _large(case, store)
    get = partial(store.storage.batch_get, large, list(many))
    for memory in _revoked_at_some_time(store, large, many, get):
        _must_stay_unwritten(store, memory)


@check("KV-901", Need.REVOCABLE)
def a_set_reads_nothing_after_the_revoke(case: Case) -> None:
    """If pages are revoked while `batch_set` runs, each is stored as it was before, or not at all."""
    store = case.open()
    space = case.space(fitting(case, _HELD_NBYTES))
    store.open_space(space)
    pages = case.contents(space, case.hashes(min(_HELD_PAGES, store.most_pages(space))))
    case.trace.stored[space].update(pages)
    memory = store.memory(space, len(pages), 8).filled_with(list(pages.values()))
    _revoke_in_a_held_call(memory, partial(store.storage.batch_set, space, list(pages)))
    _must_be_right(case, store, space, pages)
    large, many = _large(case, store)
    store.batch_delete(large, list(many))
    put = partial(store.storage.batch_set, large, list(many))
    for _ in _revoked_at_some_time(store, large, many, put):
        _must_be_right(case, store, large, many)
        store.batch_delete(large, list(many))


def _revoked() -> AtomicRevocable:
    revocable = AtomicRevocable()
    revocable.revoke()
    return revocable


def _large(case: Case, store: Probe) -> tuple[KeySpace, Mapping[str, bytes]]:
    """Store pages so large that a call takes a while. Return the key space and the accepted pages."""
    space = case.space(fitting(case, _LARGE_NBYTES), tenant="large")
    store.open_space(space)
    pages = case.contents(space, case.hashes(min(_LARGE_PAGES, store.most_pages(space))))
    stored = store.set(space, pages)
    return space, {one: pages[one] for one, kept in zip(pages, stored, strict=True) if kept}


def _revoke_in_a_held_call(memory: PageMemory, call: Callable[[Sequence[Page]], object]) -> None:
    """Hold a call in its first page, revoke all pages, and overwrite them as a next user would."""
    revocable = AtomicRevocable()
    for page in memory.pages:
        page.revocable = revocable

    def run(first: Page) -> None:
        first.revocable = revocable
        _answered(partial(call, [first, *memory.pages[1:]]))

    with Threads() as threads:
        held: HeldCall[None] = threads.hold(run, memory.pages[0])
        revoking = threads.start(revocable.revoke)
        if not revoking.wait(_REVOKED_WITHIN_S):  # The call is held inside an access.
            threads.open_gates()
        revoking.result()
        overwrite(memory.pages)
        held.release()


def _revoked_at_some_time(
    store: Probe,
    space: KeySpace,
    pages: Mapping[str, bytes],
    call: Callable[[Sequence[Page]], object],
) -> Generator[PageMemory, None, None]:
    """Make calls, and revoke each call's pages later than in the call before. Yield the memory."""
    contents = list(pages.values())
    began_s = time.monotonic()
    call(store.memory(space, len(pages)).filled_with(contents).pages)
    took_s = time.monotonic() - began_s
    yield store.memory(space, 0)
    for attempt in range(_ATTEMPTS):
        memory = store.memory(space, len(pages)).filled_with(contents)
        revocable = AtomicRevocable()
        for page in memory.pages:
            page.revocable = revocable
        with Threads() as threads:
            task = threads.start(_answered, partial(call, memory.pages))
            time.sleep(took_s * attempt / _ATTEMPTS)
            revocable.revoke()
            overwrite(memory.pages[::-1])  # A call goes from the first page to the last.
            task.result()
        yield memory


def _answered(call: Callable[[], object]) -> None:
    """Make a call whose pages are revoked while it runs. It may fail."""
    with suppress(HiCacheError):
        call()


def _must_stay_unwritten(store: Probe, memory: PageMemory) -> None:
    if not all(map(is_overwritten, memory.pages)):
        raise store.violation(
            f"{_CLAIM}batch_get wrote into a page after its memory was revoked",
            expected="no byte of it changes once `revoke` has returned",
            got="bytes of the next user of the memory were overwritten",
        )


def _must_be_right(case: Case, store: Probe, space: KeySpace, pages: Mapping[str, bytes]) -> None:
    for page_hash, data in pages.items():
        (read,) = store.get(space, [page_hash])
        if read not in (None, data):
            with note("the page was revoked, and its memory reused, while batch_set ran"):
                raise case.wrong_bytes(store, space, page_hash, read, [data])
