"""KV-003: a hit returns exactly the bytes that were set under this hash, in this key space."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.scenarios.edge_cases import deceptive_bytes, nearly_equal, similar_hashes
from hicache_conformance.scenarios.setup import TimeBudget, fitting, note, open_and_set, open_store
from hicache_conformance.tools.processes.machine import WorkLimit

if TYPE_CHECKING:
    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_MANY = 1 << 16
_MANY_ABSENT = 500_000
"""With so many pages, about eight of these hashes begin with the same 32 bits as one of them."""
_AT_ONCE = 256
"""Some stores need room for all pages of a batch at once, and a small one has about a thousand."""
_ASKED_AT_ONCE = 8192
_MANY_SETS_S = 20.0
_MANY_LOOKUPS_S = 10.0
_MANY_GETS_S = 20.0


@check("KV-003")
def any_bytes_are_read_back(case: Case) -> None:
    """Pages may hold any bytes: zeros, text, line ends and file headers come back as they were set."""
    store = case.open()
    for nbytes in (8, 600, 2000):
        space = case.space(fitting(case, nbytes))
        store.open_space(space)
        samples = deceptive_bytes(space.stored_nbytes, case.random)
        hashes = dict(zip(case.hashes(len(samples)), samples, strict=True))
        pages = {page_hash: samples[description] for page_hash, description in hashes.items()}
        for page_hash, description in hashes.items():
            with note(f"the page holds {description}, {space.stored_nbytes} bytes"):
                case.must_set(store, space, {page_hash: pages[page_hash]})
                case.must_hold(store, space, {page_hash: pages[page_hash]})
        case.must_hold(store, space, pages)
        store.delete(space, list(pages))


@check("KV-003")
def pages_that_are_nearly_equal_are_apart(case: Case) -> None:
    """Pages with equal checksums, and pages that differ in a byte or in order, keep their own bytes."""
    store = case.open()
    for nbytes in (40, 1000, 3000):
        space = case.space(fitting(case, nbytes))
        store.open_space(space)
        contents = nearly_equal(space.stored_nbytes, case.random)
        pages = dict(zip(case.hashes(len(contents)), contents, strict=True))
        with note(
            "another page differs in a byte or in the order of bytes, or has the same CRC-32 or Adler-32"
        ):
            case.must_set(store, space, pages)
            case.must_hold(store, space, pages)
        store.delete(space, list(pages))


@check("KV-003")
def hashes_that_are_alike_are_apart(case: Case) -> None:
    """Hashes that share digits, a number or a start belong to different pages."""
    store, space = open_store(case, 64)
    budget = TimeBudget()
    for description, similar in similar_hashes(case.random).items():
        hashes = budget.shortened(similar)
        pages = case.contents(space, hashes)
        with (
            note(f"page hashes are confused with each other: {description}"),
            budget.measured(len(hashes)),
        ):
            first = dict(list(pages.items())[:1])
            case.must_set(store, space, first)
            case.must_miss(store, space, hashes[1:], "was never set, only one with a similar hash")
            case.must_set(store, space, pages)
            case.must_hold(store, space, pages)
        store.delete(space, hashes)


@check("KV-003", quick=False, stochastic=True)
def pages_of_many_hashes_are_apart(case: Case) -> None:
    """Of 65,536 pages none has the bytes of another, and none of 500,000 other hashes is there."""
    store, space = open_store(case, 16)
    limit = WorkLimit(_MANY_SETS_S)
    pages: dict[str, bytes] = {}
    while len(pages) < _MANY and not limit.is_over():
        some = {one: _named(one, space) for one in _random_hashes(case, _AT_ONCE)}
        taken = store.set(space, some)
        pages.update(item for item, ok in zip(some.items(), taken, strict=True) if ok)
        if not all(taken):
            break
    asked = 0
    limit = WorkLimit(_MANY_LOOKUPS_S)
    while asked < _MANY_ABSENT and not limit.is_over():
        absent = _random_hashes(case, _ASKED_AT_ONCE)
        asked += len(absent)
        for page_hash, there in zip(absent, store.exists(space, absent), strict=True):
            if there:
                raise store.violation(
                    f"batch_exists is True for a page that was never set, among {len(pages)} others",
                    expected="False",
                    got=f"True for {page_hash}",
                )
    case.evidence["pages, and other hashes"] = f"{len(pages)} and {asked}"
    _must_be_apart(case, store, space, pages)


def _must_be_apart(case: Case, store: Probe, space: KeySpace, pages: dict[str, bytes]) -> None:
    """Read pages in random order, as many as there is time for. No hit may have wrong bytes."""
    hashes = case.random.sample(list(pages), len(pages))
    limit = WorkLimit(_MANY_GETS_S)
    for start in range(0, len(hashes), _AT_ONCE):
        if limit.is_over():
            break
        part = hashes[start : start + _AT_ONCE]
        for page_hash, data in zip(part, store.get(space, part), strict=True):
            if data is None and case.keeps:
                case.missed(store, space, page_hash)
            elif data is not None and data != pages[page_hash]:
                with note(f"{len(pages)} pages were set"):
                    raise case.wrong_bytes(store, space, page_hash, data, [pages[page_hash]])


def _random_hashes(case: Case, count: int) -> list[str]:
    return [case.random.randbytes(32).hex() for _ in range(count)]


def _named(page_hash: str, space: KeySpace) -> bytes:
    """Return the content of a small page: the beginning of its hash."""
    return bytes.fromhex(page_hash)[: space.stored_nbytes].ljust(space.stored_nbytes, b"\0")


@check("KV-003")
def a_page_of_another_size_is_no_hit(case: Case) -> None:
    """A page that is set in one key space is a miss in another whose pages are longer or shorter."""
    store = case.open()
    nbytes = fitting(case, 2000) // 2
    sizes = [size for size in (nbytes, nbytes + 1, nbytes - 1, 2 * nbytes, 1) if size > 0]
    spaces = [case.space(size) for size in dict.fromkeys(sizes)]
    if nbytes > 8:
        spaces.append(case.space(nbytes - 8, frame_nbytes=8))
    for space in spaces:
        store.open_space(space)
    for space in spaces:
        pages = case.contents(space, case.hashes(2))
        case.must_set(store, space, pages)
        for other in spaces:
            if other is not space:
                why = f"was set with {_size(space)}, and is read with {_size(other)}"
                case.must_miss(store, other, list(pages), why)
        case.must_hold(store, space, pages)


def _size(space: KeySpace) -> str:
    frame = f", a frame of {space.frame_nbytes} included" if space.frame_nbytes else ""
    return f"{space.stored_nbytes} bytes{frame}"


@check("KV-003")
def sizes_under_one_hash_are_apart(case: Case) -> None:
    """Key spaces with different page sizes each keep their own bytes under the same hashes."""
    store = case.open()
    nbytes = fitting(case, 2048) // 2
    spaces = [case.space(size) for size in dict.fromkeys((nbytes or 1, 2 * nbytes or 1, 1))]
    hashes = case.hashes(2)
    for space in (*spaces, *reversed(spaces)):
        open_and_set(case, store, space, *hashes)
    for space in spaces:
        with note("key spaces of other page sizes have this hash too"):
            case.must_hold(store, space, case.contents(space, hashes))


@check("KV-003")
def a_page_reads_the_same_every_time(case: Case) -> None:
    """A page reads the same every time, whatever pages are read or missed in between."""
    store = case.open()
    small, large = (case.space(fitting(case, nbytes)) for nbytes in (700, 6000))
    for space in (small, large):
        store.open_space(space)
    pages = {space: case.stored(store, space, 3) for space in (small, large)}
    for _ in range(3):
        for space in (large, small, large):
            for page_hash, data in pages[space].items():
                case.must_hold(store, space, {page_hash: data})
                case.must_miss(store, space, case.hashes(1), "was never set")
            case.must_hold(store, space, pages[space])
