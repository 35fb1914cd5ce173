"""KV-008: pages of every size, in any number of segments."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotDeclared
from hicache_conformance.scenarios.edge_cases import FEW_PAGE_SIZES, PAGE_SIZES, segmentations
from hicache_conformance.scenarios.setup import fitting, note, open_and_set
from hicache_conformance.tools.content.memory import PageMemory
from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_ALWAYS_TAKEN_NBYTES = 4096
"""A store that accepts a larger page must not refuse pages up to this size for lack of room."""
_LARGE_PAGE_SIZES = (
    (1 << 18) + 1,
    1 << 20,
    (1 << 20) + 1,
    (4 << 20) + 3,
    16 << 20,
    (16 << 20) + 1,
    (33 << 20) + 7,
    64 << 20,
)
_LARGE_IN_QUICK_NBYTES = 4 << 20
_BATCH_NBYTES = 32 << 20
"""A batch of more than two pages has at most this many bytes, because a store may be small."""


@check("KV-008")
def every_size_of_page_works(case: Case) -> None:
    """The store keeps pages of every size, odd or even, from 1 byte on."""
    limit = case.claims.max_page_nbytes or PAGE_SIZES[-1]
    sizes = FEW_PAGE_SIZES if case.quick else PAGE_SIZES
    _must_keep_sizes(case, [nbytes for nbytes in sizes if nbytes <= limit], 3)


@check("KV-008")
def large_pages_work(case: Case) -> None:
    """The store keeps pages of up to 64 MiB, or refuses a size only if it has no room for it."""
    most = _LARGE_IN_QUICK_NBYTES if case.quick else _LARGE_PAGE_SIZES[-1]
    limit = min(most, case.claims.max_page_nbytes or most)
    _must_keep_sizes(case, sorted({limit, *(n for n in _LARGE_PAGE_SIZES if n < limit)}), 1)


@check("KV-008")
def sizes_coexist_in_one_store(case: Case) -> None:
    """Key spaces with different page sizes, used in turn, each keep their own pages."""
    store = case.open()
    sizes = dict.fromkeys(fitting(case, nbytes) for nbytes in (512, 4096, 1, 513, 7000, 33))
    spaces = [case.space(nbytes) for nbytes in sizes]
    hashes = case.hashes(2)
    for space in spaces:
        open_and_set(case, store, space, hashes[0])
    for space in reversed(spaces):
        open_and_set(case, store, space, hashes[1])
    for space in spaces:
        with note("key spaces of other page sizes were used in turn with it"):
            case.must_hold(store, space, case.contents(space, hashes))


@check("KV-008")
def a_frame_is_a_part_of_the_page(case: Case) -> None:
    """A key space with a frame keeps all `stored_nbytes`, both frame and payload."""
    store = case.open()
    limit_nbytes = fitting(case, 5000)
    for frame_nbytes, page_nbytes in ((64, 4000), (4096, 512), (1, 1), (333, 1000)):
        if frame_nbytes + page_nbytes > limit_nbytes:
            continue
        space = case.space(page_nbytes, frame_nbytes=frame_nbytes)
        store.open_space(space)
        pages = case.contents(space, case.hashes(3))
        lengths = [frame_nbytes, page_nbytes]
        if not store.storage.capabilities.scatter_gather or case.claims.alignment > 1:
            lengths = [space.stored_nbytes]
        with note(f"a frame of {frame_nbytes} bytes lies in front of {page_nbytes}"):
            _set_cut(case, store, space, pages, lengths)
            case.must_hold(store, space, pages)
            _must_read_cut(case, store, space, pages, lengths)


@check("KV-008")
def any_segmentation_is_read_back_in_any_other(case: Case) -> None:
    """Pages that were set in 1 to 512 segments can be read into 1 to 512 other segments."""
    store, space = _scattered(case, 4099)
    alignment = case.claims.alignment
    cuts = segmentations(space.stored_nbytes, alignment, case.random)
    written = case.contents(space, case.hashes(len(cuts)))
    pages = {
        description: {page_hash: data}
        for description, (page_hash, data) in zip(cuts, written.items(), strict=True)
    }
    for description, lengths in cuts.items():
        with note(f"it was set in {description}"):
            _set_cut(case, store, space, pages[description], lengths)
            case.must_hold(store, space, pages[description])
    for description, lengths in cuts.items():
        for others, page in pages.items():
            with note(f"it was set in {others} and read in {description}"):
                _must_read_cut(case, store, space, page, lengths)


@check("KV-008")
def batches_of_many_segments_work(case: Case) -> None:
    """A batch of pages with 512 segments each can be set and read whole."""
    store, space = _scattered(case, 6000)
    pages = case.contents(space, case.hashes(max(2, min(8, _BATCH_NBYTES // space.stored_nbytes))))
    lengths = list(segmentations(space.stored_nbytes, case.claims.alignment, case.random).values())
    with note(f"{len(pages)} pages in {len(lengths[-1])} segments each"):
        _set_cut(case, store, space, pages, lengths[-1])
        case.must_hold(store, space, pages)
        _must_read_cut(case, store, space, pages, lengths[-1])


@check("KV-008")
def segments_may_lie_in_any_order(case: Case) -> None:
    """A page's bytes follow the order of its segments, wherever those lie in memory."""
    store, space = _scattered(case, 4000)
    lengths = segmentations(space.stored_nbytes, case.claims.alignment, case.random)
    pages = case.contents(space, case.hashes(2 * len(lengths)))
    hashes = iter(pages)
    for description, cuts in lengths.items():
        for order in (_reversed, _shuffled):
            (page_hash,) = islice(hashes, 1)
            with note(f"in {description}, which lie in another order in memory"):
                memory = _cut_memory(store, space, 1, cuts)
                page = order(case, memory.pages[0])
                page.copy_from(pages[page_hash])
                if store.batch_set(space, [page_hash], [page]) == [True]:
                    case.must_hold(store, space, {page_hash: pages[page_hash]})
                    memory.blank()
                    hit = store.batch_get(space, [page_hash], [page]) == [True]
                    if hit and page.tobytes() != pages[page_hash]:
                        right = [pages[page_hash]]
                        raise case.wrong_bytes(store, space, page_hash, page.tobytes(), right)


def _reversed(_: Case, page: Page) -> Page:
    return Page(*reversed(page.segments))


def _shuffled(case: Case, page: Page) -> Page:
    return Page(*case.random.sample(page.segments, len(page.segments)))


def _must_keep_sizes(case: Case, sizes: Sequence[int], count: int) -> None:
    """Set, read and delete pages of each size. Only sizes above every accepted one may be refused."""
    store = case.open()
    refused: list[int] = []
    largest = 0
    for nbytes in sizes:
        space = case.space(nbytes)
        store.open_space(space)
        pages = case.contents(space, case.hashes(count))
        if not all(store.set(space, pages)) and not all(store.set(space, pages)):
            refused.append(nbytes)
        else:
            largest = nbytes
            with note(f"pages of {nbytes} bytes"):
                case.must_hold(store, space, pages)
        store.delete(space, list(pages))
    case.evidence["largest page kept"] = f"{largest} bytes"
    wrong = [nbytes for nbytes in refused if nbytes < max(largest, _ALWAYS_TAKEN_NBYTES)]
    if wrong:
        raise store.violation(
            f"batch_set refuses pages of {wrong[0]} bytes",
            expected=f"True: pages of {largest} bytes are taken" if largest else "True",
            got="False, twice",
            sequence=store.trace.sequence(f"/{wrong[0]}B/"),
        )


def _scattered(case: Case, nbytes: int) -> tuple[Probe, KeySpace]:
    """Open a key space, if the store takes pages in segments. End the check if it does not."""
    store = case.open()
    if not store.storage.capabilities.scatter_gather:
        raise NotDeclared("the store claims to take no pages in segments")
    space = case.space(fitting(case, nbytes * case.claims.alignment))
    store.open_space(space)
    return store, space


def _set_cut(
    case: Case, store: Probe, space: KeySpace, pages: dict[str, bytes], lengths: Sequence[int]
) -> None:
    """Set pages whose segments have these lengths. Every verdict must be True."""
    for part in _batches(store, space, list(pages)):
        memory = _cut_memory(store, space, len(part), lengths)
        memory.filled_with([pages[page_hash] for page_hash in part])
        if not all(store.batch_set(space, part, memory.pages)):
            violation = store.violation(
                f"batch_set refused pages of {len(lengths)} segments", expected="True for each"
            )
            raise case.refused(space, violation)
        if [page.tobytes() for page in memory.pages] != [pages[h] for h in part]:
            raise store.violation(f"batch_set changed a page of {len(lengths)} segments")
        _check(memory, store, "batch_set", lengths)


def _must_read_cut(
    case: Case, store: Probe, space: KeySpace, pages: dict[str, bytes], lengths: Sequence[int]
) -> None:
    """Read pages into segments of these lengths. Every page must be a hit with its bytes."""
    for part in _batches(store, space, list(pages)):
        memory = _cut_memory(store, space, len(part), lengths)
        hits = store.batch_get(space, part, memory.pages)
        _check(memory, store, "batch_get", lengths)
        for page_hash, page, hit in zip(part, memory.pages, hits, strict=True):
            if not hit:
                case.missed(store, space, page_hash)
            elif page.tobytes() != pages[page_hash]:
                right = [pages[page_hash]]
                raise case.wrong_bytes(store, space, page_hash, page.tobytes(), right)


def _batches(store: Probe, space: KeySpace, hashes: list[str]) -> list[list[str]]:
    step = store.most_pages(space)
    return [hashes[start : start + step] for start in range(0, len(hashes), step)]


def _cut_memory(store: Probe, space: KeySpace, count: int, lengths: Sequence[int]) -> PageMemory:
    alignment = store.storage.capabilities.alignment
    return PageMemory(count, space.stored_nbytes, alignment=alignment, lengths=lengths)


def _check(memory: PageMemory, store: Probe, operation: str, lengths: Sequence[int]) -> None:
    overrun = memory.overrun()
    if overrun:
        raise store.violation(
            f"{operation} wrote outside the segments of a page that has {len(lengths)} (KV-004)",
            got=overrun,
        )
