"""Compares batches, in which pages are absent or occur twice, with the pages that were stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_conformance.run.outcomes import Violation
    from hicache_storage.keys import KeySpace

    Call: TypeAlias = Callable[[Sequence[str], Sequence[Any]], list[bool]]


def calls(store: Probe, space: KeySpace) -> dict[str, Call]:
    """Return the four batch calls by name. Each takes hashes and pages, and makes one call."""
    return {
        "batch_exists": lambda hashes, _: store.batch_exists(space, hashes),
        "batch_get": lambda hashes, pages: store.batch_get(space, hashes, pages),
        "batch_set": lambda hashes, pages: store.batch_set(space, hashes, pages),
        "batch_delete": lambda hashes, _: store.batch_delete(space, hashes),
    }


def must_answer(
    case: Case,
    store: Probe,
    space: KeySpace,
    hashes: Sequence[str],
    pages: Mapping[str, bytes | Sequence[bytes]],
) -> None:
    """Check `get` and `exists` of `hashes`: a page in `pages` is a hit with one of its contents."""
    found = store.get(space, hashes)
    seen = store.exists(space, hashes)
    for place, (page_hash, data, there) in enumerate(zip(hashes, found, seen, strict=True)):
        allowed = pages.get(page_hash)
        if allowed is None:
            if there or data is not None:
                raise _unexpected_hit(case, store, space, (place, page_hash), data)
            continue
        contents = [allowed] if isinstance(allowed, bytes) else list(allowed)
        if data is None:
            case.missed(store, space, page_hash)
        elif data not in contents:
            raise case.wrong_bytes(store, space, page_hash, data, contents)
        if not there:
            case.missed(store, space, page_hash, "batch_exists")


def _unexpected_hit(
    case: Case, store: Probe, space: KeySpace, item: tuple[int, str], data: bytes | None
) -> Violation:
    """Return the violation for a hit on an absent page. `data` is what batch_get read, if anything."""
    place, page_hash = item
    operation = "batch_exists" if data is None else "batch_get"
    got = f"[{place}] {page_hash[:8]}: True"
    if data is not None:
        got += f" with {case.diagnosed(space, page_hash, data, [])}"
    return store.violation(
        f"{operation} is True for a page that was never set, in a batch with others",
        expected="False",
        got=got,
        sequence=case.trace.sequence(page_hash[:8]),
    )
