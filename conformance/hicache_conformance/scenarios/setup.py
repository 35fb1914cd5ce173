"""Open stores and stored pages for checks, and notes on the violations that they meet."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hicache_conformance.run.outcomes import NotDeclared, Violation
from hicache_storage.storage import Durability

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_FIRST = 8
_STEP = 256


def fitting(case: Case, nbytes: int) -> int:
    """Return `nbytes`, or the most that the store takes in one page."""
    return min(nbytes, case.claims.max_page_nbytes or nbytes)


def open_store(case: Case, nbytes: int = 1024, **changes: Any) -> tuple[Probe, KeySpace]:
    """Return a new handle and a key space that is open in it.

    The pages have `nbytes`, or the most that the store takes. `changes` are fields of the key space.
    """
    store, space = case.open(), case.space(fitting(case, nbytes), **changes)
    store.open_space(space)
    return store, space


def store_many(
    case: Case, store: Probe, space: KeySpace, count: int, *, limit_s: float = 20.0
) -> dict[str, bytes]:
    """Store up to `count` fresh pages, fewer in a slow store. Their number goes to the evidence.

    Raises:
        NotVerified: The store has no room for so many pages, or refuses pages without a reason,
            so that the
            accepted ones show nothing.
    """
    until_s = time.monotonic() + limit_s
    planted = case.stored(store, space, min(count, _FIRST))
    while len(planted) < count and time.monotonic() < until_s:
        planted.update(case.stored(store, space, min(_STEP, count - len(planted))))
    case.evidence[f"pages of {space.stored_nbytes} bytes"] = f"{len(planted)} of {count}"
    return planted


@contextmanager
def note(description: str) -> Generator[None, None, None]:
    """Add to a violation a fact that its message can't contain."""
    try:
        yield
    except Violation as violation:
        violation.message += f" ({description})"
        raise


def open_and_set(case: Case, store: Probe, space: KeySpace, *hashes: str) -> None:
    """Open a key space and set pages of these hashes in it."""
    store.open_space(space)
    case.must_set(store, space, case.contents(space, hashes))


def another_handle(case: Case, store: Probe) -> Probe:
    """Return a second handle on a shared store, or reopen a store that is durable only.

    Raises:
        NotDeclared: The store claims that no other handle sees its pages.
    """
    claims = case.claims
    if not claims.shared:
        if claims.durability < Durability.CRASH:
            raise NotDeclared("the store claims neither shared nor durability CRASH or more")
        store.close()
    return case.open()
