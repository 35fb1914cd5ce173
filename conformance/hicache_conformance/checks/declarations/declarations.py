"""KV-901, KV-902: what a store declares is true, and it refuses what it does not declare."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from hicache_conformance.case.case import Forgot
from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.run.outcomes import NotDeclared, Violation
from hicache_conformance.scenarios.setup import fitting, note, open_store, store_many
from hicache_storage.errors import UnsupportedOperation
from hicache_storage.storage import LIMITS, Capabilities, Durability, Retention

if TYPE_CHECKING:
    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_READS = 40


# --- KV-901 --------------------------------------------------------------------------------------


@check("KV-901")
def claims_are_a_record_of_sound_values(case: Case) -> None:
    """A class and its instances each declare one `Capabilities`, with valid values."""
    store = case.open()
    for owner, claims in _owners(store):
        if not isinstance(claims, Capabilities):
            raise store.violation(
                f"the capabilities of {owner} are not a Capabilities",
                expected="one hicache_storage.Capabilities",
                got=repr(claims)[:200],
            )
        for name, sound in _soundness(claims).items():
            if not sound:
                raise store.violation(
                    f"the capabilities of {owner} declare an impossible {name}",
                    expected=f"{name}: {_field_type(name)}",
                    got=repr(getattr(claims, name)),
                )


@check("KV-901")
def an_instance_claims_no_more_than_its_class(case: Case) -> None:
    """An instance may narrow the claims of its class, but never widen them."""
    store = case.open()
    widest, narrow = type(store.storage).capabilities, store.storage.capabilities
    wider = [
        name
        for name in (
            "retention",
            "durability",
            "shared",
            "enumerable",
            "scatter_gather",
            "bounded",
            "revocable",
            "keeps_given",
        )
        if getattr(narrow, name) > getattr(widest, name)
    ]
    for name in LIMITS:
        most, limit = getattr(widest, name), getattr(narrow, name)
        if most is not None and (limit is None or limit > most):
            wider.append(name)
    if wider:
        raise store.violation(
            f"an instance claims more than its class: {', '.join(wider)}",
            expected=_claims_text(widest, wider),
            got=_claims_text(narrow, wider),
        )


@check("KV-901")
def claims_stay_the_same(case: Case) -> None:
    """The claims of a storage don't change while it is used, or when it is opened again."""
    store = case.open()
    first = store.storage.capabilities
    space = case.space(fitting(case, 64))
    store.open_space(space)
    pages = case.stored(store, space, 2)
    case.must_hold(store, space, pages)
    used = store.storage.capabilities
    if not first.shared:  # The store may allow only one handle at a time.
        store.close()
    for when, claims in (
        ("after a few calls", used),
        ("of another handle on the same config", case.open().storage.capabilities),
    ):
        changed = [
            one.name
            for one in fields(first)
            if getattr(first, one.name) != getattr(claims, one.name)
        ]
        if changed:
            raise store.violation(
                f"the claims {when} differ from those before: {', '.join(changed)}",
                expected=_claims_text(first, changed),
                got=_claims_text(claims, changed),
            )


@check("KV-901", quick=False)
def what_is_kept_until_deleted_is_kept(case: Case) -> None:
    """A store that claims UNTIL_DELETED keeps every page that it accepted, however many follow."""
    if not case.keeps:
        raise NotDeclared("the store does not claim retention UNTIL_DELETED")
    store = case.open()
    small, large = case.space(fitting(case, 256)), case.space(fitting(case, 128 << 10), pool="swa")
    sizes = ((small, 1100), (large, 24)) if case.quick else ((small, 4200), (large, 200))
    for space, _ in sizes:
        store.open_space(space)
    held = [(space, store_many(case, store, space, count, limit_s=8)) for space, count in sizes]
    for space, pages in held:
        with note(f"the first of {len(pages)} pages of {space.page_nbytes} bytes that were set"):
            case.must_hold(store, space, dict(list(pages.items())[:200]))
        with note(f"{len(pages)} pages of {space.page_nbytes} bytes were set"):
            case.must_hold(store, space, dict(list(pages.items())[200:]))


@check("KV-901")
def what_is_kept_until_pressure_is_kept_without_any(case: Case) -> None:
    """A store that claims UNTIL_PRESSURE keeps the only page that was set, however often it is read."""
    if case.claims.retention is not Retention.UNTIL_PRESSURE:
        raise NotDeclared("the store does not claim retention UNTIL_PRESSURE")
    store, space = open_store(case, 64)
    pages = case.stored(store, space, 1)
    for turn in range(_READS):
        if store.get(space, list(pages)) != list(pages.values()):
            raise Forgot(
                "a store that claims UNTIL_PRESSURE forgot the only page that was set",
                "a hit: one page is no pressure",
                f"a miss at read {turn + 1}",
                tuple(case.trace.sequence()),
            )


@check("KV-901", Need.DURABLE)
def what_is_durable_survives_reopening(case: Case) -> None:
    """A store that claims CRASH or more still has its pages after it was closed and opened again."""
    store = case.open()
    spaces = [case.space(fitting(case, 512)), case.space(fitting(case, 100), pool="draft")]
    for space in spaces:
        store.open_space(space)
    held = {space: case.stored(store, space, 6) for space in spaces}
    deleted = list(held[spaces[0]])[:2]
    store.delete(spaces[0], deleted)
    last = case.stored(store, spaces[0], 1)
    store.close()
    again = case.open(label="reopened")
    for space in spaces:
        again.open_space(space)
    case.must_miss(again, spaces[0], deleted, "was deleted before the store was closed")
    case.must_hold(again, spaces[1], held[spaces[1]])
    case.must_hold(again, spaces[0], {**dict(list(held[spaces[0]].items())[2:]), **last})


@check("KV-901", Need.SHARED)
def what_is_shared_is_seen_by_another_handle(case: Case) -> None:
    """A handle on a shared store sees what other handles have set and deleted since its last look."""
    store, other = case.open(), case.open(label="other")
    space = case.space(fitting(case, 300))
    for one in (store, other):
        one.open_space(space)
    hashes = case.hashes(6)
    pages = case.contents(space, hashes)
    case.must_miss(other, space, hashes, "was not set yet")
    case.must_set(store, space, pages)
    case.must_hold(other, space, pages)
    store.delete(space, hashes[:3])
    case.must_miss(other, space, hashes[:3], "another handle deleted")
    case.must_set(other, space, case.contents(space, hashes[:1]))
    case.must_hold(store, space, case.contents(space, hashes[:1] + hashes[3:]))


@check("KV-901", Need.ENUMERABLE)
def what_is_enumerable_is_listed_and_cleared(case: Case) -> None:
    """A store that claims to be enumerable can list a page, list its key space, and clear it."""
    store, space = open_store(case, 64)
    pages = case.stored(store, space, 3)
    with note("the store claims to be enumerable"):
        listed = {info.page_hash for info in store.scan(space)}
        known = space in store.spaces()
        store.clear(space)
    if case.keeps and (listed != set(pages) or not known):
        raise store.violation(
            "a store that claims to be enumerable does not list what is there",
            expected=f"{len(pages)} pages and their key space",
            got=f"{len(listed)} pages; its key space is {'listed' if known else 'not listed'}",
        )
    case.must_miss(store, space, list(pages), "was cleared")


@check("KV-901")
def without_overwrites_the_first_bytes_stay(case: Case) -> None:
    """A store that claims not to overwrite returns True for a present page and keeps its first bytes."""
    if case.claims.overwrites:
        raise NotDeclared("the store claims that it may overwrite")
    store, space = open_store(case, 700)
    hashes = case.hashes(8)
    first, second = case.contents(space, hashes), case.contents(space, hashes, 1)
    case.must_set(store, space, first)
    present = store.exists(space, hashes)
    case.must_set(store, space, second)
    found = store.get(space, hashes)
    changed = [
        page_hash
        for page_hash, there, data in zip(hashes, present, found, strict=True)
        if there and data == second[page_hash]
    ]
    if changed and (case.keeps or len(changed) == sum(present)):
        kind = Violation if case.keeps else Forgot
        raise kind(
            "overwrites is declared False, and a set of a present page changed its bytes",
            "the bytes that were set first",
            f"{changed[0][:8]}: the bytes that were set second; so for {len(changed)} of 8 pages",
            tuple(case.trace.sequence(changed[0][:8])),
        )
    case.must_hold(store, space, {one: (first[one], second[one]) for one in hashes})


@check("KV-901")
def pages_in_segments_are_taken(case: Case) -> None:
    """A store that claims scatter/gather stores and fills pages that have several segments."""
    if not case.claims.scatter_gather:
        raise NotDeclared("the store does not claim scatter_gather")
    store, space = open_store(case, 4001)
    for write, read in ((7, 1), (1, 5), (3, 16)):
        pages = case.stored(store, space, 3, segments=write)
        with note(f"written in {write} segments, read in {read}"):
            case.must_hold(store, space, pages, segments=read)


# --- KV-902 --------------------------------------------------------------------------------------


@check("KV-902")
def a_store_that_does_not_list_says_so(case: Case) -> None:
    """If a store does not claim `enumerable`, its `scan` and `spaces` raise UnsupportedOperation."""
    store, space, _ = _unlisted(case)
    for operation, call in (
        ("scan", lambda: list(store.storage.scan(space))),
        ("spaces", lambda: list(store.storage.spaces())),
    ):
        answer: object = store.attempt(operation, space, [], call)
        if not isinstance(answer, UnsupportedOperation):
            raise store.violation(
                f"{operation} answers, although enumerable is not declared",
                expected="UnsupportedOperation, when it is called or iterated",
                got=repr(answer)[:200],
            )


@check("KV-902")
def a_store_that_does_not_list_clears_all_or_nothing(case: Case) -> None:
    """If a store does not claim `enumerable`, `clear` removes all pages, or raises and removes none."""
    store, space, pages = _unlisted(case)
    answer = store.attempt("clear", space, [], lambda: store.storage.clear(space))
    if isinstance(answer, UnsupportedOperation):
        with note("after a clear that was refused"):
            case.must_hold(store, space, pages)
        return
    if answer != len(pages) and (case.keeps or answer not in range(1, len(pages) + 1)):
        raise store.violation(
            "clear answers, although enumerable is not declared, but its answer is wrong",
            expected=f"UnsupportedOperation, or {len(pages)}: the number of pages that were there",
            got=repr(answer),
        )
    case.must_miss(store, space, list(pages), "was cleared")


def _unlisted(case: Case) -> tuple[Probe, KeySpace, dict[str, bytes]]:
    """Open the store if it is not enumerable, and set a few pages. Otherwise end the check."""
    if case.claims.enumerable:
        raise NotDeclared("the store claims to be enumerable: there is nothing to refuse")
    store, space = open_store(case, 64)
    return store, space, case.stored(store, space, 5)


def _owners(store: Probe) -> list[tuple[str, object]]:
    kind = type(store.storage)
    return [
        (f"the class {kind.__name__}", kind.capabilities),
        (f"an instance of {kind.__name__}", store.storage.capabilities),
    ]


def _soundness(claims: Capabilities) -> dict[str, bool]:
    """Return for each field whether its value has the right type and range."""
    orders: dict[str, type] = {"retention": Retention, "durability": Durability}
    flags = (
        *("shared", "enumerable", "overwrites"),
        *("scatter_gather", "bounded", "revocable", "keeps_given"),
    )
    return {
        **{name: isinstance(getattr(claims, name), kind) for name, kind in orders.items()},
        **{name: type(getattr(claims, name)) is bool for name in flags},
        **{name: _is_count(getattr(claims, name)) for name in ("alignment", "parallelism")},
        **{
            name: getattr(claims, name) is None or _is_count(getattr(claims, name))
            for name in LIMITS
        },
    }


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _field_type(name: str) -> str:
    return next(str(one.type) for one in fields(Capabilities) if one.name == name)


def _claims_text(claims: Capabilities, names: list[str]) -> str:
    return ", ".join(f"{name}={getattr(claims, name)!r}" for name in names)
