"""KV-903: a call at a limit works, and a call one past it is refused without side effects."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotDeclared, NotVerified, Violation
from hicache_conformance.scenarios.setup import note, open_store
from hicache_conformance.scenarios.small_stores import make_small
from hicache_storage.errors import UnsupportedOperation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_LARGEST_TRIED_NBYTES = 64 << 20
_LARGEST_TRIED_QUICK_NBYTES = 4 << 20
_SMALL_NBYTES = 256 << 10
_LONGEST_BATCH = 20_000
_MOST_NBYTES = 256 << 20
_MOST_NBYTES_QUICK = 32 << 20
_PAGES_OF_A_BATCH = 8


@check("KV-903")
def a_page_of_the_largest_size_is_taken(case: Case) -> None:
    """A page of `max_page_nbytes`, with or without a frame, can be opened, set and read back."""
    limit = _page_limit(case)
    tried = _LARGEST_TRIED_QUICK_NBYTES if case.quick else _LARGEST_TRIED_NBYTES
    store = case.open()
    frame = limit // 4
    for space in (case.space(limit), case.space(limit - frame, frame_nbytes=frame)):
        store.open_space(space)
        if limit > tried:
            case.evidence["set"] = f"not tried: {limit} bytes are more than {tried}"
            continue
        pages = case.contents(space, case.hashes(1))
        if store.set(space, pages) == [True]:
            case.must_hold(store, space, pages)
            store.delete(space, list(pages))
        else:
            _must_lack_room(case, store, space)


@check("KV-903")
def a_small_store_takes_a_page_of_its_largest_size(case: Case) -> None:
    """An empty store whose capacity limits its pages takes a page of `max_page_nbytes`."""
    declares = case.claims.max_page_nbytes is not None
    try:
        make_small(case, _SMALL_NBYTES)
    except NotVerified:
        if declares:
            raise
    limit = _page_limit(case)
    if limit > _SMALL_NBYTES:
        raise NotDeclared("the capacity does not limit the size of pages")
    store, space = open_store(case, limit)
    pages = case.contents(space, case.hashes(1))
    if store.set(space, pages) != [True]:
        raise store.violation(
            "an empty store refuses a page of the largest size that it declares",
            expected=f"True for {limit} bytes, which is max_page_nbytes at this capacity",
            got="False",
        )
    case.must_hold(store, space, pages)


@check("KV-903")
def a_page_one_byte_too_large_is_refused(case: Case) -> None:
    """`open_space` refuses pages of `max_page_nbytes` + 1, frame included, and nothing else fails."""
    limit = _page_limit(case)
    store = case.open()
    space = case.space(min(limit, 64))
    store.open_space(space)
    pages = case.stored(store, space, 2)
    for page_nbytes, frame_nbytes in ((limit + 1, 0), (limit, 1), (1, limit), (2 * limit, 0)):
        large = case.space(page_nbytes, frame_nbytes=frame_nbytes, tenant="large")
        opening = partial(store.storage.open_space, large)
        answer: object = store.attempt("open_space", large, [], opening)
        if not isinstance(answer, UnsupportedOperation):
            raise store.violation(
                "open_space takes a key space whose pages are larger than max_page_nbytes",
                expected=f"UnsupportedOperation: pages of {large.stored_nbytes} bytes, a frame of"
                f" {frame_nbytes} included, are more than {limit}",
                got=repr(answer),
            )
    with note("after open_space had refused a larger key space"):
        case.must_hold(store, space, pages)
        listed = store.spaces() if case.claims.enumerable else []
    refused = [one for one in listed if one.model == space.model and one.tenant == "large"]
    if refused:
        raise store.violation("spaces() lists a key space that was refused", got=str(refused[0]))


@check("KV-903")
def a_batch_of_the_limit_is_taken(case: Case) -> None:
    """A batch of `max_batch` pages can be set, found, read and deleted in one call each."""
    store, space, hashes = _batch(case, 0)
    pages = case.contents(space, hashes)
    case.must_set(store, space, pages)
    case.must_hold(store, space, pages)
    store.delete(space, hashes)
    case.must_miss(store, space, hashes, "was deleted")


@check("KV-903")
def a_lookup_one_past_the_limit_is_whole_or_refused(case: Case) -> None:
    """Exists and get of `max_batch` + 1 pages are either answered in full or refused."""
    store, space, hashes = _batch(case, 1)
    pages = case.contents(space, hashes)
    case.must_set(store, space, pages)
    memory = store.memory(space, len(hashes)).pages
    for operation, call in (
        ("batch_exists", lambda: store.storage.batch_exists(space, hashes)),
        ("batch_get", lambda: store.storage.batch_get(space, hashes, memory)),
    ):
        verdicts = _whole(store, operation, space, hashes, call)
        left_out = [one for one, found in zip(hashes, verdicts or (), strict=False) if not found]
        if left_out and any(store.exists(space, left_out)):
            raise _in_part(store, operation, f"False for {len(left_out)} pages that are there")
        if verdicts and operation == "batch_get":
            for page_hash, page, hit in zip(hashes, memory, verdicts, strict=True):
                if hit and page.tobytes() != pages[page_hash]:
                    right = [pages[page_hash]]
                    raise case.wrong_bytes(store, space, page_hash, page.tobytes(), right)


@check("KV-903")
def a_set_one_past_the_limit_is_whole_or_refused(case: Case) -> None:
    """A set of `max_batch` + 1 pages either stores all of them, or is refused and stores none."""
    store, space, hashes = _batch(case, 1)
    pages = case.contents(space, hashes)
    memory = store.memory(space, len(hashes)).filled_with(list(pages.values()))
    verdicts = _whole(
        store,
        "batch_set",
        space,
        hashes,
        lambda: store.storage.batch_set(space, hashes, memory.pages),
    )
    if verdicts is None:
        case.must_miss(store, space, hashes, "was in a batch that was refused")
        return
    left_out = {h: pages[h] for h, taken in zip(hashes, verdicts, strict=True) if not taken}
    if left_out and any(store.set(space, left_out)):
        raise _in_part(
            store, "batch_set", f"False for {len(left_out)} pages that there is room for"
        )
    case.must_hold(store, space, {h: data for h, data in pages.items() if h not in left_out})


@check("KV-903")
def a_delete_one_past_the_limit_is_whole_or_refused(case: Case) -> None:
    """A delete of `max_batch` + 1 pages either removes all of them, or is refused and removes none."""
    store, space, hashes = _batch(case, 1)
    pages = case.contents(space, hashes)
    case.must_set(store, space, pages)
    verdicts = _whole(
        store, "batch_delete", space, hashes, lambda: store.storage.batch_delete(space, hashes)
    )
    if verdicts is None:
        with note("after a batch_delete that was refused"):
            case.must_hold(store, space, pages)
        return
    removed = [page_hash for page_hash, deleted in zip(hashes, verdicts, strict=True) if deleted]
    if len(removed) != len(hashes):
        raise _in_part(store, "batch_delete", f"True for {len(removed)} of {len(hashes)} pages")
    case.must_miss(store, space, hashes, "was deleted")


@check("KV-903")
def a_batch_of_the_most_bytes_is_taken(case: Case) -> None:
    """A batch of `max_batch_nbytes` of pages can be set and read in one call each."""
    store, space, hashes = _batch_of_bytes(case, 0)
    pages = case.contents(space, hashes)
    memory = store.memory(space, len(hashes)).filled_with(list(pages.values()))
    if not all(store.batch_set(space, hashes, memory.pages)):
        violation = store.violation(
            "batch_set refuses pages in a batch of max_batch_nbytes", expected="True for each"
        )
        raise case.refused(space, violation)
    case.must_hold(store, space, pages)
    store.delete(space, hashes)


@check("KV-903")
def a_batch_of_more_bytes_is_whole_or_refused(case: Case) -> None:
    """A set and a get of a page more than `max_batch_nbytes` are done in full, or refused."""
    store, space, hashes = _batch_of_bytes(case, 1)
    pages = case.contents(space, hashes)
    memory = store.memory(space, len(hashes)).filled_with(list(pages.values()))
    setting = partial(store.storage.batch_set, space, hashes, memory.pages)
    verdicts = _whole(store, "batch_set", space, hashes, setting)
    if verdicts is None:
        case.must_miss(store, space, hashes, "was in a batch that was refused")
        verdicts = store.set(space, pages)
    taken = {one: pages[one] for one, ok in zip(hashes, verdicts, strict=True) if ok}
    left_out = {one: pages[one] for one in hashes if one not in taken}
    if left_out and all(store.set(space, left_out)):
        raise _in_part(store, "batch_set", f"False for {len(left_out)} pages that have room")
    memory.blank()
    reading = partial(store.storage.batch_get, space, list(taken), memory.pages[: len(taken)])
    hits = _whole(store, "batch_get", space, list(taken), reading) or []
    for page, hit, (page_hash, data) in zip(memory.pages, hits, taken.items(), strict=False):
        if hit and page.tobytes() != data:
            raise case.wrong_bytes(store, space, page_hash, page.tobytes(), [data])
    case.must_hold(store, space, taken)
    store.delete(space, hashes)


@check("KV-903")
def one_page_may_have_more_bytes_than_a_batch(case: Case) -> None:
    """A page larger than `max_batch_nbytes` is set and read alone, because it cannot be split."""
    limit = _nbytes_limit(case)
    largest = case.claims.max_page_nbytes
    if largest is not None and largest <= limit:
        raise NotDeclared(f"no page is larger than max_batch_nbytes: {largest} is the limit")
    store, smaller = open_store(case, limit)
    larger = case.space(limit + 1)
    store.open_space(larger)
    for space in (smaller, larger):
        pages = case.contents(space, case.hashes(1))
        if store.set(space, pages) == [True]:
            case.must_hold(store, space, pages)
            store.delete(space, list(pages))
        elif space is smaller:
            raise NotVerified(f"the store has no room for a page of {limit} bytes")
        else:
            raise store.violation(
                "batch_set refuses a page because it is larger than max_batch_nbytes",
                expected="True: a batch of one page may have more bytes",
                got="False",
            )


def _nbytes_limit(case: Case) -> int:
    limit = case.claims.max_batch_nbytes
    if limit is None:
        raise NotDeclared("the store claims no max_batch_nbytes")
    most = _MOST_NBYTES_QUICK if case.quick else _MOST_NBYTES
    if limit > most:
        raise NotVerified(f"a batch of {limit} bytes is more than the {most} tried")
    return limit


def _batch_of_bytes(case: Case, beyond: int) -> tuple[Probe, KeySpace, list[str]]:
    """Open a key space of which a few pages make `max_batch_nbytes`. Return that many and `beyond`."""
    limit = _nbytes_limit(case)
    pages = min(_PAGES_OF_A_BATCH, limit, case.claims.max_batch or _PAGES_OF_A_BATCH)
    store, space = open_store(case, limit // pages)
    if pages == 1 or space.stored_nbytes < limit // pages:
        raise NotDeclared("other limits of a batch are reached before max_batch_nbytes")
    return store, space, case.hashes(pages + beyond)


def _page_limit(case: Case) -> int:
    limit = case.claims.max_page_nbytes
    if limit is None:
        raise NotDeclared("the store claims no max_page_nbytes")
    return limit


def _batch(case: Case, beyond: int) -> tuple[Probe, KeySpace, list[str]]:
    """Open a key space. Return `max_batch` + `beyond` hashes."""
    limit = case.claims.max_batch
    if limit is None:
        raise NotDeclared("the store claims no max_batch")
    if limit > _LONGEST_BATCH:
        raise NotVerified(f"a batch of {limit} pages is more than the {_LONGEST_BATCH} tried")
    store, space = open_store(case, 64)
    return store, space, case.hashes(limit + beyond)


def _must_lack_room(case: Case, store: Probe, space: KeySpace) -> None:
    """Raise if a page that is one byte smaller is accepted, because then the store did have room."""
    smaller = case.space(space.page_nbytes - 1, frame_nbytes=space.frame_nbytes)
    store.open_space(smaller)
    if store.set(smaller, case.contents(smaller, case.hashes(1))) == [True]:
        raise store.violation(
            "batch_set refuses a page of max_page_nbytes, and takes one that is a byte smaller",
            expected=f"True for {space.stored_nbytes} bytes, which is declared as the limit",
            got="False",
        )
    case.evidence["set"] = f"{space.stored_nbytes} bytes were refused: there is no room"


def _whole(
    store: Probe,
    operation: str,
    space: KeySpace,
    hashes: Sequence[str],
    call: Callable[[], Any],
) -> list[bool] | None:
    """Return the verdicts of a batch that is too long, or None if it was refused."""
    answer: Any = store.attempt(operation, space, hashes, call)
    if isinstance(answer, UnsupportedOperation):
        return None
    given = cast("list[object]", answer) if isinstance(answer, list) else []
    verdicts = [one for one in given if type(one) is bool]
    if len(verdicts) != len(hashes):
        raise _in_part(store, operation, f"{answer!r}"[:100])
    return verdicts


def _in_part(store: Probe, operation: str, got: str) -> Violation:
    return store.violation(
        f"{operation} of one page more than a batch may have is done in part",
        expected="all of it done, or UnsupportedOperation and nothing done",
        got=got,
    )
