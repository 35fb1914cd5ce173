"""Pages in number, of sizes that a store takes, and what a check adds to a violation that it meets."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache_conformance.outcomes import NotDeclared, Violation
from hicache_storage.storage import Durability

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_conformance.case import Case
    from hicache_conformance.probe import Probe
    from hicache_storage.keys import KeySpace

_FIRST = 8
_STEP = 256
_SMALL_NBYTES = 4096


def fitting(case: Case, nbytes: int) -> int:
    """`nbytes`, or the most that the store takes in one page."""
    return min(nbytes, case.claims.max_page_nbytes or nbytes)


def plant(
    case: Case, store: Probe, space: KeySpace, count: int, *, limit_s: float = 20.0
) -> dict[str, bytes]:
    """`count` fresh pages, set; fewer where the store is slow, or has no room for more.

    The first few must be taken where they are small. How many there are goes to the evidence.
    """
    until_s = time.monotonic() + limit_s
    small = space.stored_nbytes <= _SMALL_NBYTES
    planted = case.stored(store, space, min(count, _FIRST)) if small else {}
    while len(planted) < count and time.monotonic() < until_s:
        pages = case.contents(space, case.hashes(min(_STEP, count - len(planted))))
        verdicts = store.set(space, pages)
        planted.update(item for item, taken in zip(pages.items(), verdicts, strict=True) if taken)
        if not all(verdicts):
            break
    case.evidence["pages"] = f"{len(planted)} of {count}"
    return planted


@contextmanager
def about(words: str) -> Generator[None, None, None]:
    """Add to a violation what its message can't know."""
    try:
        yield
    except Violation as violation:
        violation.message += f" ({words})"
        raise


def set_in(case: Case, store: Probe, space: KeySpace, *hashes: str) -> None:
    """Open a key space and set pages of these hashes in it."""
    store.open_space(space)
    case.must_set(store, space, case.contents(space, hashes))


def another_handle(case: Case, store: Probe) -> Probe:
    """A second handle on a shared store; the store reopened where it only lasts.

    Raises:
        NotDeclared: Pages are claimed to be seen by no other handle.
    """
    claims = case.claims
    if not claims.shared:
        if claims.durability < Durability.CRASH:
            raise NotDeclared("the store claims neither shared nor durability CRASH or more")
        store.close()
    return case.open()
