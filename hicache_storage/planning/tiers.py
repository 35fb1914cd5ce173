"""Compute the hits of L2 and L3: the capacity that each access needs, for every capacity at once.

The model follows the controller:

    L2   an LRU cache for all pools' pages. A request uses all blocks of its prompt, found or computed.
    L3   an LRU store behind L2. It sees only the blocks that L2 lacks: loads, and writes by the write
         policy. A block that L2 has does not count as used in L3. A block stays in L3 when L2 loads it.

A prompt's hits end before the first block that neither tier has. So an access needs the largest capacity
that its own block or any earlier block of its prompt needs.

With `write_through` each block that L2 lacks is used in L3 once, when it is loaded or written, so L3
is a plain LRU cache of these uses. With the other policies a block is written some time after it is
computed. If L3 has evicted a block and it is computed again, the model treats it as if it were
written at once.
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
"""The position of a use of L3 that comes after the end of the trace."""


@dataclass(frozen=True, slots=True)
class HostTier:
    """The capacity of L2 that each access needs. The arrays have an element for each access."""

    accesses: Accesses
    needs: Integers
    """How many blocks L2 must hold so that the accessed block is in L2. `NEVER` for a new block."""
    needs_alone: Integers
    """How many blocks L2 must hold for a hit if there is no L3."""

    @classmethod
    def of(cls, accesses: Accesses) -> HostTier:
        """Compute the capacity of L2 that each access needs."""
        previous = accesses.latest(np.ones(len(accesses), bool))
        distances = stack_distances(previous, previous, accesses.starts)
        needs = np.minimum(distances + 1, NEVER)
        return cls(accesses, needs, accesses.largest_so_far(needs))


@dataclass(frozen=True, slots=True)
class StorageTier:
    """The L3 capacity that each access needs behind one L2. Arrays have an element for each access."""

    accesses: Accesses
    in_host: Mask
    """True if L2 has the block that is accessed."""
    needs: Integers
    """How many blocks L3 must hold for a hit in L2 or L3. 0 if L2 has the whole prompt so far."""
    written_at: Integers
    """If this access computes the block, the access during which it is written. `AFTER_THE_END` if
    the policy writes it later or never."""

    @classmethod
    def of(cls, host: HostTier, host_blocks: float, policy: WritePolicy) -> StorageTier:
        """Compute the capacity of L3 that each access needs behind an L2 of `host_blocks`."""
        accesses, in_host = host.accesses, host.needs <= host_blocks
        used_at, written_at = _USES[policy](accesses, in_host, host_blocks)
        needs = np.where(in_host, 0, _needs(accesses, used_at))
        return cls(accesses, in_host, accesses.largest_so_far(needs), written_at)

    def hits(self, storage_blocks: float) -> Mask:
        """Return True for each access whose block is in L2, or in an L3 of this capacity."""
        hits: Mask = self.needs <= storage_blocks
        return hits

    def reads(self, storage_blocks: float) -> Mask:
        """Return True for each access whose block is loaded from L3."""
        return self.hits(storage_blocks) & ~self.in_host

    def writes(self, storage_blocks: float) -> Mask:
        """Return True for each access that computes a block that is written to L3 within the trace."""
        is_written: Mask = self.written_at != AFTER_THE_END
        return is_written & ~self.hits(storage_blocks) & ~self.in_host

    def unread(self, storage_blocks: float) -> Mask:
        """Return True for each access whose block is written, but not loaded when L2 next lacks it."""
        next_lack = self.accesses.following(~self.in_host)
        is_loaded = (next_lack >= 0) & self.reads(storage_blocks)[next_lack]
        return self.writes(storage_blocks) & ~is_loaded


def _needs(accesses: Accesses, used_at: Integers) -> Integers:
    """Return how many blocks L3 must hold so that it still holds the block of each access.

    `used_at` is the position at which each access uses L3, or `AFTER_THE_END`.
    """
    causes = np.flatnonzero(used_at != AFTER_THE_END)
    causes = causes[np.argsort(used_at[causes], kind="stable")]
    blocks = accesses.blocks[causes]
    previous = previous_in_group(
        np.argsort(blocks, kind="stable"), blocks, np.ones(len(causes), bool)
    )
    numbers = np.full(len(accesses) + 1, -1, np.int64)  # the last element stands for no use
    numbers[causes] = np.arange(len(causes))
    latest = accesses.latest(used_at != AFTER_THE_END)
    until = np.searchsorted(used_at[causes], accesses.starts, side="left")
    distances = stack_distances(previous, numbers[latest], until)
    return np.clip(distances + 1, 1, NEVER)


# --- when L3 is used, by write policy: the positions of uses and of writes ---------------------------


def _write_through(accesses: Accesses, in_host: Mask, _: float) -> tuple[Integers, Integers]:
    """Return the positions of L3's uses and writes if each block is written when it is computed."""
    positions = np.arange(len(accesses))
    return np.where(in_host, AFTER_THE_END, positions), positions


def _write_selectively(accesses: Accesses, in_host: Mask, _: float) -> tuple[Integers, Integers]:
    """Return the positions of L3's uses and writes if each block is written when L2 first hits it."""
    positions = np.arange(len(accesses))
    was_hit = accesses.latest(in_host) >= 0
    following = accesses.following(np.ones(len(accesses), bool))
    is_hit_next = (following >= 0) & in_host[following]
    return (
        np.where(in_host ^ was_hit, positions, AFTER_THE_END),
        np.where(is_hit_next, following, AFTER_THE_END),
    )


def _write_back(accesses: Accesses, in_host: Mask, host_blocks: float) -> tuple[Integers, Integers]:
    """Return the positions of L3's uses and writes if each block is written when L2 evicts it.

    Once L2 is full, each new block evicts the least recently used block.
    """
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
