"""What checks begin with: open stores, stored pages, time budgets, and notes on violations."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_conformance.run.outcomes import NotDeclared, NotVerified, Violation
from hicache_conformance.run.subject import Scratch
from hicache_conformance.tools.network.endpoints import endpoints_in
from hicache_conformance.tools.processes.machine import MachineDelay, WorkLimit
from hicache_storage.errors import UnsupportedOperation
from hicache_storage.storage import Durability

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

T = TypeVar("T")

NAMES_TENANT = "names"
"""The tenant of the key space by which `stores_named` tells stores apart."""
_FIRST = 8
_STEP = 256
_SOME = 6


def fitting(case: Case, nbytes: int) -> int:
    """Return `nbytes`, or the largest page that the store accepts if that is less."""
    return min(nbytes, case.claims.max_page_nbytes or nbytes)


def open_store(case: Case, nbytes: int = 1024, **changes: Any) -> tuple[Probe, KeySpace]:
    """Return a new handle, with a key space that is open in it.

    The pages have `nbytes`, or as many as the store accepts. `changes` are fields of the key space.
    """
    store, space = case.open(), case.space(fitting(case, nbytes), **changes)
    store.open_space(space)
    return store, space


def store_many(
    case: Case, store: Probe, space: KeySpace, count: int, *, limit_s: float = 20.0
) -> dict[str, bytes]:
    """Store up to `count` fresh pages, or fewer in a slow store. Note the number in the evidence.

    Raises:
        NotVerified: The store has no room for so many pages, or refuses pages for no reason, so
            that the accepted ones show nothing.
    """
    until_s = time.monotonic() + limit_s
    planted = case.stored(store, space, min(count, _FIRST))
    while len(planted) < count and time.monotonic() < until_s:
        planted.update(case.stored(store, space, min(_STEP, count - len(planted))))
    case.evidence[f"pages of {space.stored_nbytes} bytes"] = f"{len(planted)} of {count}"
    return planted


@contextmanager
def note(description: str) -> Generator[None, None, None]:
    """Add `description` to the message of a violation that is raised in the block."""
    try:
        yield
    except Violation as violation:
        violation.message += f" ({description})"
        raise


def no_files(case: Case) -> NotDeclared | NotVerified:
    """Return the exception that ends a check of files if the store wrote none in the test's directory.

    A store behind a server, or in the memory of a process, writes no files. Any other store may
    have written them elsewhere.
    """
    if str(case.scratch.path) in str(case.config):
        return NotVerified("the store writes no files in the directory that it was given")
    if endpoints_in(case.config) or _is_in_memory(case):
        return NotDeclared("the store writes no files: its pages are in a server or in memory")
    return NotVerified("the config names no place under the test's directory: use {scratch}")


def no_server(
    case: Case, missing: str = "the config names no address of a server"
) -> NotDeclared | NotVerified:
    """Return the exception that ends a check of connections if the config has no address."""
    if str(case.scratch.path) in str(case.config) or _is_in_memory(case):
        return NotDeclared("the store has no server: its pages are in files or in memory")
    return NotVerified(missing)


def nothing_refused(case: Case) -> NotDeclared | NotVerified:
    """Return the exception that ends a check of refused pages if the store refused none."""
    if case.keeps:
        return NotVerified("no set was refused: the store was not filled")
    return NotDeclared("no set was refused: the store makes room by itself when it is full")


def _is_in_memory(case: Case) -> bool:
    return not case.claims.shared and case.claims.durability < Durability.CRASH


def open_and_set(case: Case, store: Probe, space: KeySpace, *hashes: str) -> None:
    """Open a key space and set pages with these hashes in it."""
    store.open_space(space)
    case.must_set(store, space, case.contents(space, hashes))


def remove_space(store: Probe, space_id: str) -> object:
    """Remove a key space. End the check if the store has no `remove_space`."""
    storage = store.storage
    number = store.trace.began(f"{store.label}.remove_space {space_id[:6]}", [])
    try:
        found = storage.remove_space(space_id)
    except UnsupportedOperation:
        raise NotDeclared("the store does not remove key spaces") from None
    store.trace.ended(number, repr(found))
    return found


def another_handle(case: Case, store: Probe) -> Probe:
    """Return a second handle on a shared store. Reopen a store that is durable but not shared.

    Raises:
        NotDeclared: The store claims that no other handle sees its pages.
    """
    claims = case.claims
    if not claims.shared:
        if claims.durability < Durability.CRASH:
            raise NotDeclared(
                "the store claims neither `shared` nor a durability of at least CRASH"
            )
        store.close()
    return case.open()


class TimeBudget:
    """The cost of the pages so far, so that a check stops before more pages take too long.

    The time in which the machine ran something else does not count.

    for count in (10, 100, 1000):
        if not budget.allows(count):
            break
        with budget.measured(count):
            ...
    """

    def __init__(self, limit_s: float = 4.0) -> None:
        self._limit = WorkLimit(limit_s)
        self._cost_s = 0.0

    def allows(self, count: int) -> bool:
        """Return whether `count` pages can be done in time, at the cost of the last ones."""
        return self._limit.allows(count * self._cost_s)

    @contextmanager
    def measured(self, count: int) -> Generator[None, None, None]:
        """Time the `with` block, which uses `count` pages."""
        began_s, delay = time.monotonic(), MachineDelay()
        yield
        own_s = time.monotonic() - began_s - delay.so_far_s()
        self._cost_s = max(0.0, own_s) / count

    def shortened(self, items: Sequence[T]) -> Sequence[T]:
        """Return `items`. If the time is too short for all, return some, spread over all of them."""
        return items if self.allows(len(items)) else items[:: -(-len(items) // _SOME)]


def stores_named(case: Case, *names: str) -> dict[str, Probe]:
    """Open a store under each name, as its prefix and as its directory. Leave out what can't be opened.

    Raises:
        NotDeclared: Every name leads to the same store.
    """
    space, hashes = case.space(fitting(case, 64), tenant=NAMES_TENANT), case.hashes(1)
    unlike = f"other{case.scratch.prefix}"
    stores: dict[str, Probe] = {}
    for name in (unlike, *names):
        path = case.scratch.path / name
        path.mkdir(exist_ok=True)
        try:
            stores[name] = case.open(case.subject.config(Scratch(path, name)))
        except Exception as error:  # noqa: BLE001 - a table or a bucket can't have every name
            case.evidence[f"no store can be called {name}"] = f"{type(error).__name__}: {error}"
    other = stores.pop(unlike, None)
    for store in stores.values():
        open_and_set(case, store, space, *hashes)
        if other is None or other.exists(space, hashes) == [True]:
            raise NotDeclared("the config of a test does not name a store of its own")
        store.delete(space, hashes)
    return stores
