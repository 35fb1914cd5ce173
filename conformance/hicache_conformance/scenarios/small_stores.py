"""Makes stores small, so that a check can fill them quickly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache_conformance.run.outcomes import NotDeclared, NotVerified
from hicache_storage.errors import ConfigError
from hicache_storage.storage import Durability

if TYPE_CHECKING:
    from collections.abc import Sequence, Sized

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_FIELDS = ("capacity_nbytes", "max_nbytes", "map_nbytes", "size_nbytes", "capacity", "map_size")
"""Names of a capacity in configs. If a config has none, the contract's name, the first, is tried."""
_PAGE_NBYTES = 64 << 10
_PAGES = 16
"""How many pages fit into the small store."""
_MIN_CAPACITY_NBYTES = 256 << 10
_LARGEST_NBYTES = 16 << 20
"""A store with at most this capacity is not made smaller."""
_MAX_CALLS = 64
"""How many calls may fill a store, because a remote store makes few calls a second."""


@dataclass(frozen=True, slots=True)
class SmallStore:
    """An empty store with a small capacity."""

    case: Case
    probe: Probe
    space: KeySpace
    capacity_nbytes: int

    @property
    def pages(self) -> int:
        """How many pages fit if nothing else takes room."""
        return self.capacity_nbytes // self.space.stored_nbytes

    def fill(self) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """Offer twice the capacity. Return the accepted pages and the refused ones."""
        taken: dict[str, bytes] = {}
        refused: dict[str, bytes] = {}
        left = 2 * self.pages + 2
        step = -(-left // _MAX_CALLS)
        while left > 0:
            offered = self.case.contents(self.space, self.case.hashes(step))
            for item, ok in zip(offered.items(), self.probe.set(self.space, offered), strict=True):
                (taken if ok else refused).update([item])
            left -= step
        return taken, refused

    def must_accept(self, present: dict[str, bytes]) -> None:
        """Set pages that the store already has, which needs no room."""
        answers = self.probe.set(self.space, present)
        if not all(answers):
            raise self.probe.violation(
                "a store that is full refuses a page that it has",
                expected="True: setting a present page succeeds (KV-005)",
                got=f"{answers} for {len(present)} pages that are there",
            )

    def must_not_exceed_capacity(self, taken: dict[str, bytes], refused: dict[str, bytes]) -> None:
        """Raise if the store has accepted more than its capacity allows."""
        nbytes = len(taken) * self.space.stored_nbytes
        if not refused and nbytes > 2 * self.capacity_nbytes:
            raise self.probe.violation(
                f"a store of {self.capacity_nbytes} bytes took {nbytes} bytes and refused none",
                expected="False for the pages that have no room",
                got=f"True for {len(taken)} pages of {self.space.stored_nbytes} bytes",
            )

    def require_kept(self) -> None:
        """End the check if a full store may make room by itself."""
        if not self.case.keeps:
            raise NotDeclared(
                "retention is below UNTIL_DELETED: a full store may make room by itself"
            )

    def must_have_room_again(
        self, first: Sized, again: Sized, why: str, sequence: Sequence[str] = ()
    ) -> None:
        """Raise if the store accepted fewer pages than at `first`. `why` completes "a store that"."""
        if len(again) < 0.9 * len(first) - 1:
            raise self.probe.violation(
                f"a store that {why} has lost room",
                expected=f"about {len(first)} pages have room, as at first",
                got=f"{len(again)} pages",
                sequence=sequence,
            )


def small_store(case: Case, page_nbytes: int = _PAGE_NBYTES) -> SmallStore:
    """Return an empty store that is soon full, with an open key space.

    Raises:
        NotVerified: The store is not small and could not be made so. The message says why.
    """
    page_nbytes = min(page_nbytes, case.claims.max_page_nbytes or page_nbytes)
    capacity_nbytes = make_small(case, max(_MIN_CAPACITY_NBYTES, _PAGES * page_nbytes))
    page_nbytes = min(page_nbytes, max(1, capacity_nbytes // _PAGES))
    probe, space = case.open(), case.space(page_nbytes)
    probe.open_space(space)
    return SmallStore(case, probe, space, capacity_nbytes)


def make_small(case: Case, capacity_nbytes: int) -> int:
    """Reduce the capacity of the stores that are opened from now on. Return the capacity.

    Raises:
        NotVerified: The store is not small and could not be made so. The message says why.
    """
    own_nbytes = _capacity_nbytes(case)
    if own_nbytes is not None and own_nbytes <= _LARGEST_NBYTES:
        return own_nbytes
    case.reconfigure(**_small_fields(case, capacity_nbytes))
    new_nbytes = _capacity_nbytes(case)
    if new_nbytes is not None and new_nbytes > _LARGEST_NBYTES:
        raise NotVerified(
            f"the store was not made small: asked for {capacity_nbytes} bytes, it says that it has room"
            f" for {new_nbytes}"
        )
    return new_nbytes or capacity_nbytes


def _small_fields(case: Case, capacity_nbytes: int) -> dict[str, Any]:
    """Return the fields of the config to change."""
    if case.subject.offers("small_config"):
        small = case.subject.small_config(case.scratch, capacity_nbytes)
        return {name: value for name, value in small.items() if case.config.get(name) != value}
    if not _is_own(case):
        raise NotVerified(
            "the store was not made small, because its config names one that is not the test's alone,"
            " and the pages of others might be evicted: use {scratch}, or {prefix} with a store that"
            " `stats()` or `spaces()` show to be empty, or give the back door `small_config`"
        )
    name = next((one for one in _FIELDS if case.config.get(one) is not None), _FIELDS[0])
    try:
        case.subject.storage_class.from_config({**case.config, name: capacity_nbytes}).close()
    except ConfigError as error:
        raise NotVerified(
            f"the store was not made small: it refuses a `{name}` of {capacity_nbytes}, and there is"
            " no back door `small_config`"
        ) from error
    return {name: capacity_nbytes}


def _is_own(case: Case) -> bool:
    """Return whether only the test's pages can be in the store.

    A prefix may name a whole store, or only names in a store that others fill too.
    """
    dies_with_process = not case.claims.shared and case.claims.durability < Durability.CRASH
    named = str(case.config)
    if dies_with_process or str(case.scratch.path) in named:
        return True
    if case.scratch.prefix not in named:
        return False
    with case.open_storage() as storage:
        stats = storage.stats()
        if stats.pages is stats.nbytes is None and storage.capabilities.enumerable:
            return next(iter(storage.spaces()), None) is None
    return 0 in (stats.pages, stats.nbytes)


def _capacity_nbytes(case: Case) -> int | None:
    with case.open_storage() as storage:
        return storage.stats().capacity_nbytes
