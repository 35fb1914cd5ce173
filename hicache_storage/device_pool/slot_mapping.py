"""Match the slots of a transfer's pages on both sides, for each pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from hicache_storage.device_pool.tensors import LayeredPool

    PerPool: TypeAlias = Sequence[Sequence[int]]
    """A list of numbers for each pool, as in the controller's leases and reservations."""


@dataclass(frozen=True, slots=True)
class SlotMapping:
    """The slots of one pool's pages in L1 and in L2, in the same order."""

    pool: LayeredPool
    host_slots: list[int]
    device_slots: list[int]


def map_slots(
    pools: Sequence[LayeredPool],
    host_slots: PerPool,
    device_slots: Sequence[int],
    indices: PerPool | None,
) -> list[SlotMapping]:
    """Return the mapping for each pool.

    Args:
        pools: All pools of the group.
        host_slots: For each pool, the slots in L2 of its pages.
        device_slots: The slot in L1 of each page, the same in all pools.
        indices: For each pool, the numbers of its pages. None: every pool has all pages.

    Raises:
        ValueError: A slot does not exist or is given twice on one side, or the lists do not match.
    """
    present = [range(len(device_slots))] * len(pools) if indices is None else indices
    wanted = [len(pages) for pages in present]
    given = [len(slots) for slots in host_slots]
    if given != wanted or len(wanted) != len(pools):
        raise ValueError(
            f"{len(device_slots)} pages of {len(pools)} pools need {wanted} host slots, not {given}"
        )
    _check(device_slots, min(pool.slots for pool in pools), "device slot")
    mappings: list[SlotMapping] = []
    for pool, slots, pages in zip(pools, host_slots, present, strict=True):
        _check(slots, pool.host.slots, "host slot")
        _check(pages, len(device_slots), "page")
        mappings.append(SlotMapping(pool, list(slots), [device_slots[page] for page in pages]))
    return mappings


def _check(numbers: Sequence[int], count: int, what: str) -> None:
    seen: set[int] = set()
    for number in numbers:
        if not 0 <= number < count:
            raise ValueError(f"there is no {what} {number}: they are numbered 0 to {count - 1}")
        if number in seen:
            raise ValueError(f"{what} {number} is named twice: each page needs its own")
        seen.add(number)
