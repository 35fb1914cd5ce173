"""KV-403, KV-404: pages that somebody damaged behind the store's back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.run.outcomes import NotDeclared, NotVerified, Violation
from hicache_conformance.scenarios.attempts import call_at_once
from hicache_conformance.scenarios.framed_store import PAGE_STORE, FramedStore, framed_space
from hicache_conformance.scenarios.killed_writers import keep_open_if_shared, reopen
from hicache_conformance.scenarios.setup import note, open_store, remove_space
from hicache_conformance.tools.observation.pages_at_rest import InSharedFiles, OwnObject, at_rest
from hicache_conformance.tools.processes.threads import rapid_switching
from hicache_storage.page_store.results import Verdict
from hicache_storage.storage import Retention

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_conformance.tools.observation.pages_at_rest import PageAtRest
    from hicache_storage.keys import KeySpace

    Damage = Callable[[bytes, bytes], bytes | None]

_PAGE_NBYTES = 5000
_HEADER_OFFSETS = (0, 5, 8, 17, 24, 45, 113, 127)
_MISSES = {Verdict.MISS, Verdict.CORRUPT, Verdict.WRONG_KEY, Verdict.WRONG_SIZE}

_DAMAGES: dict[str, Damage] = {
    "cut by its last byte": lambda raw, _: raw[:-1],
    "emptied": lambda _raw, _: b"",
    "extended by a byte": lambda raw, _: raw + b"\0",
    "cut to half": lambda raw, _: raw[: len(raw) // 2],
    "extended by another page": lambda raw, other: raw + other,
    "cut by its first byte": lambda raw, _: raw[1:],
    "doubled": lambda raw, _: raw + raw,
    "removed": lambda _raw, _: None,
}
_MANY_HASHES = 1100
"""More than backends ask a server for at once."""
_READERS = 3
_HEALED_S = 3.0
_HEALED_S_QUICK = 0.7
_EXTENDED = ("extended by a byte", "extended by another page", "doubled")
_REMOVED = "removed"


@check("KV-403")
def a_damaged_object_is_a_miss(case: Case) -> None:
    """If a page's object was cut, emptied, extended or removed, this page is a miss, but no other is."""
    _must_be_missed(case, _damages(case))


@check("KV-403")
def an_extended_object_is_a_miss(case: Case) -> None:
    """If a page's object is longer than the page, the page is a miss, because it can't be trusted."""
    _must_be_missed(case, {description: _DAMAGES[description] for description in _EXTENDED})


@check("KV-403")
def a_removed_object_heals_when_it_is_set_unseen(case: Case) -> None:
    """If a page's object was removed behind the store's back, the next set restores the page."""
    _must_heal(case, {_REMOVED: _DAMAGES[_REMOVED]}, reads_first=False)


def _must_be_missed(case: Case, damages: Mapping[str, Damage]) -> None:
    store, space = open_store(case, _PAGE_NBYTES)
    for description, damage in damages.items():
        pages, damaged = _damaged(case, store, space, damage)
        with note(f"its object was {description}"):
            if _is_cached(case, store, space, pages, damaged):
                store = _reopened(case, store, space)
                if store.get(space, [damaged]) != [None]:
                    raise store.violation(
                        "batch_get is True for a page whose object is damaged",
                        expected="a miss",
                        got=f"True for {damaged[:8]}",
                    )
        store.delete(space, list(pages))


@check("KV-403")
def a_damaged_object_heals_when_it_is_set_after_a_miss(case: Case) -> None:
    """If a page's object was damaged, a get and a set restore the page, also for new handles."""
    _must_heal(case, _damages(case), reads_first=True)


@check("KV-403")
def a_damaged_object_heals_when_it_is_set_unseen(case: Case) -> None:
    """If a page's object was damaged, the next set restores the page, even without a get before."""
    _must_heal(case, _damages(case), reads_first=False)


@check("KV-403")
def exists_agrees_with_a_get_that_missed_a_damaged_object(case: Case) -> None:
    """If a get has missed a page because its object was damaged, `exists` is False for the page."""
    store, space = open_store(case, _PAGE_NBYTES)
    for description, damage in _damages(case).items():
        pages, damaged = _damaged(case, store, space, damage)
        with note(f"its object was {description}"):
            if _is_cached(case, store, space, pages, damaged):
                store = _reopened(case, store, space)
                if _is_cached(case, store, space, pages, damaged):
                    continue  # another check judges that
            if store.exists(space, [damaged]) != [False]:
                raise store.violation(
                    "batch_exists is True for a page whose object is damaged, after batch_get has"
                    " missed it",
                    expected="False: a page that exists shows to be missing is not fetched again",
                    got=f"True for {damaged[:8]}",
                )
        store.delete(space, list(pages))


@check("KV-403", Need.ENUMERABLE)
def damaged_objects_do_not_break_listings(case: Case) -> None:
    """If an object was damaged, a scan still lists the other pages, and a clear removes them."""
    for description, damage in _damages(case).items():
        store, space = open_store(case, _PAGE_NBYTES, tenant=description)
        pages, damaged = _damaged(case, store, space, damage)
        with note(f"an object was {description}"):
            listed = {info.page_hash for info in store.scan(space)}
            if case.keeps and not pages.keys() - {damaged} <= listed:
                raise store.violation(
                    "scan does not list a page because another one is damaged",
                    expected=f"{len(pages) - 1} whole pages",
                    got=f"{len(listed & pages.keys())} pages",
                )
            store.clear(space)
            others = [page_hash for page_hash in pages if page_hash != damaged]
            case.must_miss(store, space, others, "was cleared")


@check("KV-403", Need.ENUMERABLE)
def a_damaged_object_is_listed_as_a_page_or_as_a_fault(case: Case) -> None:
    """If `faults` finds a damaged page in a listing, a scan does not list it as a page."""
    for description, damage in _damages(case).items():
        store, space = open_store(case, _PAGE_NBYTES, tenant=description)
        _, damaged = _damaged(case, store, space, damage)
        faults = {fault.page_hash for fault in store.storage.faults(space)}
        if damaged in faults & {info.page_hash for info in store.scan(space)}:
            raise store.violation(
                f"scan lists a page that `faults` finds damaged (its object was {description})",
                expected="one of the two: scan hides damaged objects",
                got=f"{damaged[:8]} in both",
            )


@check("KV-403", stochastic=True)
def a_set_beside_the_healing_of_its_page_stays(case: Case) -> None:
    """If gets find a damaged page while a set stores it again, the page is there afterwards."""
    if case.claims.retention is Retention.BEST_EFFORT:
        raise NotDeclared("the store may forget pages at any time")
    store, space = open_store(case, _PAGE_NBYTES)
    other = case.open() if case.claims.shared else store
    other.open_space(space)
    until_s = time.monotonic() + (_HEALED_S_QUICK if case.quick else _HEALED_S)
    turns = 0
    with rapid_switching():
        while time.monotonic() < until_s:
            pages, damaged = _damaged(case, store, space, _DAMAGES["cut to half"])
            page = {damaged: pages[damaged]}
            if _is_set_while_got(store, other, space, page):
                with note("other threads got the damaged page at the same time"):
                    case.must_hold(store, space, page)
            store.delete(space, list(pages))
            turns += 1
    case.evidence["turns"] = str(turns)


def _is_set_while_got(
    store: Probe, other: Probe, space: KeySpace, page: Mapping[str, bytes]
) -> bool:
    """Set a page while threads get it. Return the verdict of the set."""
    verdicts: list[bool] = []

    def put() -> None:
        verdicts.extend(store.set(space, page))

    def get() -> None:
        other.get(space, list(page))

    call_at_once([put, *[get] * _READERS])
    return all(verdicts)


@check("KV-403", Need.ENUMERABLE)
def clear_counts_a_damaged_object_only_if_it_was_listed(case: Case) -> None:
    """If an object was damaged, clear returns how many pages a scan has listed just before."""
    for description, damage in _damages(case).items():
        store, space = open_store(case, _PAGE_NBYTES, tenant=description)
        _damaged(case, store, space, damage)
        listed = len(store.scan(space))
        removed = store.clear(space)
        if removed not in range(listed if case.keeps else 0, listed + 1):
            raise store.violation(
                f"clear counts a page that is none (its object was {description})",
                expected=f"{listed}, as many as scan listed",
                got=repr(removed),
            )


@check("KV-403")
def a_fault_behind_many_hashes_is_found(case: Case) -> None:
    """If `faults` finds a damaged page alone, it finds it also as the last of many hashes."""
    store, space = open_store(case, _PAGE_NBYTES)
    _, damaged = _damaged(case, store, space, _DAMAGES["cut to half"])
    if not _has_fault(store, space, [damaged]):
        raise NotDeclared("the store's `faults` does not find a page of a wrong length")
    most = min(case.claims.max_batch or _MANY_HASHES, _MANY_HASHES)
    if not _has_fault(store, space, [*case.hashes(2 * most), damaged]):
        raise store.violation(
            "`faults` finds a damaged page alone, and not as the last of many hashes",
            expected=f"{damaged[:8]} among the faults of {2 * most + 1} hashes",
            got="no fault",
        )


def _has_fault(store: Probe, space: KeySpace, hashes: Sequence[str]) -> bool:
    return any(fault.page_hash == hashes[-1] for fault in store.storage.faults(space, hashes))


@check("KV-403")
def a_damaged_object_goes_with_its_key_space(case: Case) -> None:
    """If an object was damaged, `remove_space` removes it with the other pages."""
    remove_space(case.open(), "0" * 32)
    for description, damage in _damages(case).items():
        store, space = open_store(case, _PAGE_NBYTES, tenant=description)
        pages = case.stored(store, space, 3)
        damaged = list(pages)[1]
        found = _own_object(case, space, pages, damaged)
        _apply_damage(found, damage, pages)
        remove_space(store, space.id)
        if _has_bytes(case, space, damaged, found):
            raise store.violation(
                f"remove_space leaves the page whose object was {description}",
                expected="no object: nobody can name it any more",
                got=f"the object of {damaged[:8]}",
            )


def _has_bytes(case: Case, space: KeySpace, page_hash: str, found: OwnObject) -> bool:
    """Return whether the object is there, and not empty."""
    if case.subject.offers("peek"):
        return bool(case.subject.peek(space, page_hash))
    if case.subject.offers("tamper"):
        raise NotVerified("needs the back door `peek`")
    try:
        return bool(found.read())
    except FileNotFoundError:
        return False


@check("KV-403")
def the_page_store_heals_a_damaged_object(case: Case) -> None:
    """If an object was damaged, the page store misses the page, and its next save heals it."""
    space = framed_space(case, _PAGE_NBYTES)
    for description, damage in _damages(case).items():
        store = FramedStore(case, case.open(), space)
        payloads = case.contents(space, case.hashes(3))
        stored = store.save(payloads)
        damaged = list(payloads)[1]
        _apply_damage(_own_object(case, store.stored_space, stored, damaged), damage, stored)
        with note(f"its object was {description}"):
            store = _missed_by_page_store(case, store, space, payloads, {damaged})
            _must_be_healed(case, store, space, payloads)


@check("KV-404")
def a_flipped_bit_is_a_miss_and_heals(case: Case) -> None:
    """If any bit of a page is flipped, the page store misses the page, and its next save heals it."""
    space = framed_space(case, 1000)
    store = FramedStore(case, case.open(), space)
    nbytes, frame_nbytes = store.stored_space.stored_nbytes, store.stored_space.frame_nbytes
    offsets = [*_HEADER_OFFSETS, frame_nbytes, nbytes // 2, nbytes - 1]
    offsets += [case.random.randrange(nbytes) for _ in range(2 if case.quick else 6)]
    payloads = case.contents(space, case.hashes(len(offsets)))
    stored = store.save(payloads)
    store = _reopen_if_shared_file(case, store, space, stored)
    for page_hash, offset in zip(payloads, offsets, strict=True):
        bit = case.random.randrange(8)
        case.trace.ended(
            case.trace.began(f"bit {bit} of byte {offset} flipped", [page_hash]), "done"
        )
        _page_at_rest(case, store.stored_space, stored, page_hash).flip(offset, bit)
    store = _missed_by_page_store(case, store, space, payloads, set(payloads))
    _must_be_healed(case, store, space, payloads)


@check("KV-404")
def a_flipped_bit_is_no_hit_without_the_page_store(case: Case) -> None:
    """Without the page store, a page with a flipped bit is a miss too, and the next set heals it."""
    store, space = open_store(case, _PAGE_NBYTES)
    first = case.stored(store, space, 1)
    _page_at_rest(case, space, first, next(iter(first)))
    if PAGE_STORE not in case.absent:
        raise NotDeclared("the page store finds flipped bits in the pages of this store")
    for bit, offset in enumerate((0, _PAGE_NBYTES // 2, _PAGE_NBYTES - 1)):
        pages = case.stored(store, space, 3)
        damaged = list(pages)[1]
        at = min(offset, space.stored_nbytes - 1)
        _page_at_rest(case, space, pages, damaged).flip(at, bit)
        with note(f"bit {bit} of its byte {at} was flipped"):
            if _is_cached(case, store, space, pages, damaged):
                store = _reopened(case, store, space)
                _is_cached(case, store, space, pages, damaged)
            page = {damaged: pages[damaged]}
            case.must_set(store, space, page)
            case.must_hold(store, space, page)


@check("KV-404")
def a_flipped_bit_in_what_the_store_adds_does_no_harm(case: Case) -> None:
    """A flipped bit in what the store adds to a page costs at most that page, until its next save."""
    space = framed_space(case, 1000)
    store = FramedStore(case, case.open(), space)
    payloads = case.contents(space, case.hashes(8))
    stored = store.save(payloads)
    for bit, page_hash in enumerate(payloads):
        found = _own_object(case, store.stored_space, stored, page_hash)
        if not found.overhead_offsets():
            raise NotDeclared("the store puts nothing around a page")
        found.flip_raw(case.random.choice(found.overhead_offsets()), bit)
    verdicts = store.load(payloads)
    _no_errors(case, verdicts)
    _must_be_healed(case, store, space, payloads)


# --- objects -------------------------------------------------------------------------------------


def _damages(case: Case) -> dict[str, Damage]:
    return dict(list(_DAMAGES.items())[: 4 if case.quick else None])


def _damaged(
    case: Case, store: Probe, space: KeySpace, damage: Damage
) -> tuple[dict[str, bytes], str]:
    """Store three pages and damage the object of one. Return the pages and the damaged one's hash."""
    pages = case.stored(store, space, 3)
    damaged = list(pages)[1]
    _apply_damage(_own_object(case, space, pages, damaged), damage, pages)
    return pages, damaged


def _apply_damage(found: OwnObject, damage: Damage, pages: Mapping[str, bytes]) -> None:
    found.write(damage(found.read(), next(iter(pages.values()))))


def _own_object(
    case: Case, space: KeySpace, pages: Mapping[str, bytes], page_hash: str
) -> OwnObject:
    found = _page_at_rest(case, space, pages, page_hash)
    if not isinstance(found, OwnObject):
        raise NotVerified(
            "a page shares its files with other pages: give the back door `tamper` to cut its object"
        )
    return found


def _page_at_rest(
    case: Case, space: KeySpace, pages: Mapping[str, bytes], page_hash: str
) -> PageAtRest:
    return at_rest(case.subject, case.scratch.path, space, pages, page_hash)


def _reopened(case: Case, store: Probe, space: KeySpace) -> Probe:
    keep_open_if_shared(case, store)
    fresh = reopen(case)
    fresh.open_space(space)
    return fresh


def _is_cached(
    case: Case, store: Probe, space: KeySpace, pages: Mapping[str, bytes], damaged: str
) -> bool:
    """Read all pages. Return True if the damaged one is a hit, from an undamaged copy in memory."""
    found = dict(zip(pages, store.get(space, list(pages)), strict=True))
    if found[damaged] not in (None, pages[damaged]):
        raise case.wrong_bytes(store, space, damaged, found[damaged] or b"", [])
    others = {h: data for h, data in pages.items() if h != damaged}
    case.must_hold(store, space, others)
    lost = [page_hash for page_hash in others if found[page_hash] is None]
    if lost and case.keeps:
        raise store.violation(
            "a damaged page makes another one of its batch a miss",
            expected="True for every other page",
            got=f"False for {lost[0][:8]}",
        )
    return found[damaged] is not None


def _must_heal(case: Case, damages: Mapping[str, Damage], *, reads_first: bool) -> None:
    store, space = open_store(case, _PAGE_NBYTES)
    for description, damage in damages.items():
        pages, damaged = _damaged(case, store, space, damage)
        with note(f"its object was {description}"):
            if reads_first and _is_cached(case, store, space, pages, damaged):
                store = _reopened(case, store, space)
                store.get(space, [damaged])
            page = {damaged: pages[damaged]}
            case.must_set(store, space, page)
            case.must_hold(store, space, page)
            store = _reopened(case, store, space)
            # The last handle had the page in its memory.
            if store.get(space, [damaged]) == [None]:
                case.must_set(store, space, page)
                store = _reopened(case, store, space)
            case.must_hold(store, space, page)
        store.delete(space, list(pages))


# --- through the page store ----------------------------------------------------------------------


def _reopen_if_shared_file(
    case: Case, store: FramedStore, space: KeySpace, stored: Mapping[str, bytes]
) -> FramedStore:
    """If pages share a file, reopen the store, because an open handle may have cached the file."""
    found = _page_at_rest(case, store.stored_space, stored, next(iter(stored)))
    if not isinstance(found, InSharedFiles):
        return store
    store.close()
    return FramedStore(case, reopen(case), space)


def _missed_by_page_store(
    case: Case,
    store: FramedStore,
    space: KeySpace,
    payloads: Mapping[str, bytes],
    damaged_hashes: set[str],
) -> FramedStore:
    """Load all pages. The damaged ones must be misses, on this handle or at least on a new one."""
    for attempt in range(2):
        verdicts = store.load(payloads)
        _no_errors(case, verdicts)
        wrong = sum(verdict not in (Verdict.OK, Verdict.MISS) for verdict in verdicts.values())
        if store.corrupt_count() != wrong:
            raise Violation("damaged pages are not counted", str(wrong), str(store.corrupt_count()))
        case.evidence["damaged"] = f"{wrong} found by the page store"
        if all(verdicts[page_hash] is not Verdict.OK for page_hash in damaged_hashes):
            return store
        if attempt == 0:
            store.close()
            store = FramedStore(case, reopen(case), space)
    raise NotVerified(
        "damaged pages come back undamaged: the store reads them from memory, or repairs them"
    )


def _no_errors(case: Case, verdicts: Mapping[str, Verdict]) -> None:
    for page_hash, verdict in verdicts.items():
        if verdict not in _MISSES | {Verdict.OK}:
            raise Violation(
                "a damaged page makes the whole call fail",
                "a miss, or a page that the page store finds corrupt",
                verdict.value,
                tuple(case.trace.sequence(page_hash[:8])),
            )


def _must_be_healed(
    case: Case, store: FramedStore, space: KeySpace, payloads: Mapping[str, bytes]
) -> None:
    store.save(payloads)
    for _ in range(2):
        verdicts = store.load(payloads)
        unhealed = [
            page_hash for page_hash, verdict in verdicts.items() if verdict is not Verdict.OK
        ]
        if unhealed and (case.keeps or verdicts[unhealed[0]] is not Verdict.MISS):
            raise Violation(
                "a damaged page is not healed by the next save",
                "ok: it was missed, deleted and saved again",
                f"{verdicts[unhealed[0]].value} for {unhealed[0][:8]}",
                tuple(case.trace.sequence(unhealed[0][:8])),
            )
        store.close()
        store = FramedStore(case, reopen(case), space)
    store.close()
