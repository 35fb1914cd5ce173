"""Compare the pages of two stores.

Two key spaces belong together if `hicache copy` would copy one to the other, so they may differ in the
size of the frame. A page counts as present if an engine would get it: one that the store knows to be
damaged counts as absent, and is also counted as wrong.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hicache_storage.cli.operations.copying import target_space
from hicache_storage.cli.operations.proofs import fault_proof
from hicache_storage.cli.operations.verification import Verification, verify_space
from hicache_storage.native.reference.frames import FRAME_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hicache_storage.cli.operations.proofs import PageProof
    from hicache_storage.cli.operations.selection import SpaceSelection
    from hicache_storage.cli.progress import Meter
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage, UnreadableSpace

SIDES = ("source", "target")


@dataclass(frozen=True, slots=True)
class SpacePair:
    """A key space as each store has it. None: the store does not have it."""

    source: KeySpace | None
    target: KeySpace | None

    @property
    def either(self) -> KeySpace:
        """The key space of the source, or that of the target if only it has one."""
        space = self.source or self.target
        assert space is not None
        return space

    @property
    def ids(self) -> set[str]:
        """The ids of the key space in both stores."""
        return {space.id for space in (self.source, self.target) if space is not None}


@dataclass(frozen=True, slots=True)
class Compared:
    """The key spaces to compare, and those of each store that cannot be."""

    pairs: list[SpacePair]
    unreadable: dict[str, list[UnreadableSpace]]
    """Key spaces in which no page can be read, for `source` and for `target`."""


@dataclass(frozen=True, slots=True)
class SpaceDifference:
    """How the pages of one key space differ."""

    pair: SpacePair
    both: int
    only: dict[str, list[str]]
    """The hashes that only one store has, for `source` and for `target`."""
    wrong: dict[str, list[PageProof]]
    """Pages of each store that are not what their key says."""

    def as_json(self, *, listed: bool) -> dict[str, Any]:
        """Return the key space and the figures, and with `listed` each page."""
        space = self.pair.either
        found: dict[str, Any] = {"id": space.id, **space.manifest(), "both_pages": self.both}
        for side in SIDES:
            found[f"only_{side}_pages"] = len(self.only[side])
            found[f"wrong_{side}_pages"] = dict(proof_counts(self.wrong[side]))
            if listed:
                found[f"only_{side}"] = self.only[side]
                found[f"wrong_{side}"] = [_finding(page) for page in self.wrong[side]]
        return found


@dataclass(slots=True)
class Differences:
    """The totals of a comparison."""

    both: int = 0
    only: Counter[str] = field(default_factory=Counter[str])
    wrong: dict[str, Counter[str]] = field(
        default_factory=lambda: {side: Counter[str]() for side in SIDES}
    )
    unreadable: dict[str, list[UnreadableSpace]] = field(
        default_factory=dict[str, "list[UnreadableSpace]"]
    )

    def add(self, one: SpaceDifference) -> None:
        """Add the figures of one key space."""
        self.both += one.both
        for side in SIDES:
            self.only[side] += len(one.only[side])
            self.wrong[side] += proof_counts(one.wrong[side])

    @property
    def is_none(self) -> bool:
        """True if both stores have the same pages, and all of them could be compared."""
        return not (self.only.total() or any(self.wrong.values()) or any(self.unreadable.values()))

    def as_json(self) -> dict[str, Any]:
        """Return the totals."""
        found: dict[str, Any] = {"both_pages": self.both}
        for side in SIDES:
            found[f"only_{side}_pages"] = self.only[side]
            found[f"wrong_{side}_pages"] = dict(self.wrong[side])
            found[f"unreadable_{side}_spaces"] = [asdict(one) for one in self.unreadable[side]]
        return found


def proof_counts(pages: Iterable[PageProof]) -> Counter[str]:
    """Return the number of pages by what is wrong with them."""
    return Counter(page.proof.value for page in pages)


def select_pairs(
    source: HiCacheStorage, target: HiCacheStorage, selection: SpaceSelection
) -> Compared:
    """Return the key spaces that a selection finds in at least one of two stores.

    Raises:
        ConfigError: The selection finds none in either store.
    """
    storages = {"source": source, "target": target}
    spaces = {side: [*storage.spaces()] for side, storage in storages.items()}
    unreadable = {side: [*storage.unreadable_spaces()] for side, storage in storages.items()}
    readable = {one.id: one for side in SIDES for one in spaces[side]}
    others = {one.space_id: one for side in SIDES for one in unreadable[side]}
    selected = selection.among(
        readable.values(), (one for one in others.values() if one.space_id not in readable)
    )
    order = {one.id: number for number, one in enumerate(selected.spaces)}
    chosen = {*order, *(one.space_id for one in selected.unreadable)}
    pairs = [pair for pair in _pairs(spaces, target) if pair.ids & order.keys()]
    pairs.sort(key=lambda pair: min(order[id_] for id_ in pair.ids if id_ in order))
    return Compared(
        pairs,
        {side: [one for one in unreadable[side] if one.space_id in chosen] for side in SIDES},
    )


def compare(
    source: HiCacheStorage,
    target: HiCacheStorage,
    pairs: Sequence[SpacePair],
    meter: Meter,
    *,
    reads: bool = False,
) -> Iterator[SpaceDifference]:
    """Yield how the pages of each key space differ. With `reads`, read and verify all pages.

    A comparison needs memory for the hashes of one key space in both stores.
    """
    if reads and meter.wants_total:
        meter.begin(
            sum(
                info.nbytes
                for pair in pairs
                for storage, space in ((source, pair.source), (target, pair.target))
                if space is not None
                for info in storage.scan(space)
            )
        )
    for pair in pairs:
        here, wrong_here = _pages(source, pair.source, meter, reads=reads)
        there, wrong_there = _pages(target, pair.target, meter, reads=reads)
        yield SpaceDifference(
            pair,
            len(here & there),
            {"source": _hashes(here - there), "target": _hashes(there - here)},
            {"source": wrong_here, "target": wrong_there},
        )


def _pairs(spaces: dict[str, list[KeySpace]], target: HiCacheStorage) -> Iterator[SpacePair]:
    left = {space.id: space for space in spaces["target"]}
    for space in spaces["source"]:
        is_framed = space.frame_nbytes >= FRAME_NBYTES
        twin = target_space(space, target) if is_framed else space
        yield SpacePair(space, left.pop(twin.id, None))
    for space in left.values():
        yield SpacePair(None, space)


def _pages(
    storage: HiCacheStorage, space: KeySpace | None, meter: Meter, *, reads: bool
) -> tuple[set[bytes], list[PageProof]]:
    """Return the hashes of the right pages, and what is wrong with the others."""
    if space is None:
        return set(), []
    if reads:
        found = Verification()
        verify_space(storage, space, meter, found)
        wrong = [finding.page for finding in found.findings]
    else:
        wrong = [fault_proof(fault) for fault in storage.faults(space)]
    pages: set[bytes] = set()
    for info in storage.scan(space):
        pages.add(bytes.fromhex(info.page_hash))
        if not reads:
            meter.advance(1, 0)
    pages.difference_update(bytes.fromhex(page.page_hash) for page in wrong)
    return pages, wrong


def _hashes(pages: set[bytes]) -> list[str]:
    return sorted(page.hex() for page in pages)


def _finding(page: PageProof) -> dict[str, str]:
    return {"hash": page.page_hash, "reason": page.proof.value, "detail": page.detail}
