"""Hits of L2 and L3: the capacity that each access needs, for every capacity at once.

The model is that of the controller:

    L2   an LRU cache of all pools' pages. A request uses all blocks of its prompt, found or computed.
    L3   an LRU store behind it. It sees the blocks that L2 lacks: loads, and writes by the write
         policy. A block that L2 has is not used in L3. A block that was loaded to L2 stays in L3.

The hits of a prompt end in front of the first block that neither tier has. An access therefore needs the
largest capacity that any block of the prompt up to it needs.

With `write_through` each block that L2 lacks is used in L3 once, loaded or written, and L3 is a plain
LRU cache of these uses. With the other policies a block is written later than it was computed. A block
that L3 has evicted, and that is computed again, is modelled as if it were written at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicache_storage.controller_settings import WritePolicy
from hicache_storage.planning.stack_distances import (
    NEVER,
    Integers,
    Mask,
    previous_in_group,
    stack_distances,
)

if TYPE_CHECKING:
    from hicache_storage.planning.accesses import Accesses

AFTER_THE_END = 1 << 60
"""The position of a use of L3 that the trace does not reach."""


@dataclass(frozen=True, slots=True)
class HostTier:
    """L2. The arrays have an element for each access."""

    accesses: Accesses
    needs: Integers
    """The blocks that L2 must hold to have the block at its access; `NEVER` for a new block."""
    needs_alone: Integers
    """The blocks that L2 must hold for a hit where there is no L3."""

    @classmethod
    def of(cls, accesses: Accesses) -> HostTier:
        """Compute the needs of all accesses."""
        previous = accesses.latest(np.ones(len(accesses), bool))
        distances = stack_distances(previous, previous, accesses.starts)
        needs = np.minimum(distances + 1, NEVER)
        return cls(accesses, needs, accesses.largest_so_far(needs))


@dataclass(frozen=True, slots=True)
class StorageTier:
    """L3 behind an L2 of one capacity. The arrays have an element for each access."""

    accesses: Accesses
    in_host: Mask
    """True where L2 has the block."""
    needs: Integers
    """The blocks that L3 must hold for a hit in L2 or L3; 0 where L2 has the whole prompt so far."""
    written_at: Integers
    """The access during which the block is written if this access computes it; `AFTER_THE_END` where the
    policy writes it later or never."""

    @classmethod
    def of(cls, host: HostTier, host_blocks: float, policy: WritePolicy) -> StorageTier:
        """Compute the needs of all accesses behind an L2 of `host_blocks`."""
        accesses, in_host = host.accesses, host.needs <= host_blocks
        used_at, written_at = _USES[policy](accesses, in_host, host_blocks)
        needs = np.where(in_host, 0, _needs(accesses, used_at))
        return cls(accesses, in_host, accesses.largest_so_far(needs), written_at)

    def hits(self, storage_blocks: float) -> Mask:
        """Return True for each access that L2, or an L3 of this capacity, has the block for."""
        hits: Mask = self.needs <= storage_blocks
        return hits

    def reads(self, storage_blocks: float) -> Mask:
        """Return True for each access whose block is loaded from L3."""
        return self.hits(storage_blocks) & ~self.in_host

    def writes(self, storage_blocks: float) -> Mask:
        """Return True for each access that computes a block which the trace sees written to L3."""
        is_written: Mask = self.written_at != AFTER_THE_END
        return is_written & ~self.hits(storage_blocks) & ~self.in_host

    def unread(self, storage_blocks: float) -> Mask:
        """Return True for each access whose block is written, and not loaded when L2 next lacks it."""
        next_lack = self.accesses.following(~self.in_host)
        is_loaded = (next_lack >= 0) & self.reads(storage_blocks)[next_lack]
        return self.writes(storage_blocks) & ~is_loaded


def _needs(accesses: Accesses, used_at: Integers) -> Integers:
    """Return the blocks that L3 must hold to have the block of each access.

    `used_at` is the position of the use of L3 that each access causes, or `AFTER_THE_END`.
    """
    causes = np.flatnonzero(used_at != AFTER_THE_END)
    causes = causes[np.argsort(used_at[causes], kind="stable")]
    blocks = accesses.blocks[causes]
    previous = previous_in_group(
        np.argsort(blocks, kind="stable"), blocks, np.ones(len(causes), bool)
    )
    numbers = np.full(len(accesses) + 1, -1, np.int64)  # the last place is for no use
    numbers[causes] = np.arange(len(causes))
    latest = accesses.latest(used_at != AFTER_THE_END)
    until = np.searchsorted(used_at[causes], accesses.starts, side="left")
    distances = stack_distances(previous, numbers[latest], until)
    return np.clip(distances + 1, 1, NEVER)


# --- the uses of L3, by write policy: their positions, and those of writes ---------------------------


def _write_through(accesses: Accesses, in_host: Mask, _: float) -> tuple[Integers, Integers]:
    """Write each computed block at once."""
    positions = np.arange(len(accesses))
    return np.where(in_host, AFTER_THE_END, positions), positions


def _write_selectively(accesses: Accesses, in_host: Mask, _: float) -> tuple[Integers, Integers]:
    """Write each block at its first hit in L2."""
    positions = np.arange(len(accesses))
    was_hit = accesses.latest(in_host) >= 0
    following = accesses.following(np.ones(len(accesses), bool))
    is_hit_next = (following >= 0) & in_host[following]
    return (
        np.where(in_host ^ was_hit, positions, AFTER_THE_END),
        np.where(is_hit_next, following, AFTER_THE_END),
    )


def _write_back(accesses: Accesses, in_host: Mask, host_blocks: float) -> tuple[Integers, Integers]:
    """Write each block when L2 evicts it: in the order of last uses, one for each block that arrives."""
    positions = np.arange(len(accesses))
    arrivals = np.flatnonzero(~in_host)
    following = accesses.following(np.ones(len(accesses), bool))
    last_uses = np.flatnonzero((following < 0) | ~in_host[following])
    evicting = arrivals[int(min(host_blocks, len(arrivals))) :]
    last_uses = last_uses[: len(evicting)]
    latest_arrival = accesses.latest(~in_host)
    arrived = np.where(in_host, latest_arrival, positions)[last_uses]
    written_at = np.full(len(accesses), AFTER_THE_END, np.int64)
    written_at[arrived] = evicting
    used_at = np.where(in_host, AFTER_THE_END, positions)
    is_new = ~in_host & (latest_arrival < 0)
    return np.where(is_new, written_at, used_at), written_at


_USES = {
    WritePolicy.WRITE_THROUGH: _write_through,
    WritePolicy.WRITE_THROUGH_SELECTIVE: _write_selectively,
    WritePolicy.WRITE_BACK: _write_back,
}
