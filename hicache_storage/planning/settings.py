"""Settings of a plan: pools, the sizes of L2 and L3 to compare, write policy, and prices."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from hicache_storage.controller_settings import WritePolicy
from hicache_storage.errors import ConfigError
from hicache_storage.page_store.frame import FRAME_NBYTES
from hicache_storage.replay.trace import BLOCK_TOKENS, check_page_tokens
from hicache_storage.scalars import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.replay.models import PoolShape

MAX_PAGES = 10_000_000
"""Up to this number of accesses to pages, every block is analyzed instead of a sample."""
HOURS_PER_MONTH = 730.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The costs of computing and keeping pages, in one currency. None: not known."""

    prefill_tokens_per_s: float | None = None
    """Prompt tokens that one GPU computes per second."""
    gpu_hour: float | None = None
    host_gib_month: float = 0.0
    storage_gib_month: float = 0.0
    busy_hours_per_month: float = HOURS_PER_MONTH
    """Hours of a month with the same load as in the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """The settings of a plan.

    Raises:
        ConfigError: The page size does not divide a block, or a host size holds no block, or a tier is
            not larger than the one above it.
    """

    model: str
    pools: tuple[PoolShape, ...]
    """All pools, the target first."""
    page_tokens: int = 64
    host_sizes: tuple[int, ...] = ()
    """The sizes of L2 to compare, in bytes. Empty: sizes that fit the trace."""
    storage_sizes: tuple[int, ...] = ()
    """The sizes of L3 to compare, in bytes, 0 for no L3. Empty: sizes that fit the trace."""
    tiers: tuple[tuple[str, int], ...] = ()
    """The names and sizes of the tiers of one L3, the fastest first. Their sizes are compared, too."""
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    prices: Prices = field(default_factory=Prices)
    max_pages: int = MAX_PAGES

    def __post_init__(self) -> None:
        check_page_tokens(self.page_tokens)
        block_nbytes = self.pages_per_block * self.page_nbytes(self.pools)
        for size in self.host_sizes:
            if self.host_blocks(size) < 1:
                raise ConfigError(
                    f"--host-size of {format_nbytes(size)} holds no block of {BLOCK_TOKENS} tokens,"
                    f" which takes {format_nbytes(block_nbytes)}: give more"
                )

        for (name, nbytes), (below, below_nbytes) in pairwise(self.tiers):
            if below_nbytes <= nbytes:
                raise ConfigError(
                    f"--tier {below} must be larger than {name}, because a tier also keeps what the"
                    " tiers above it keep: give the fastest and smallest one first"
                )

    @property
    def pages_per_block(self) -> int:
        """The number of pages in one block of the trace."""
        return BLOCK_TOKENS // self.page_tokens

    def page_nbytes(self, pools: Sequence[PoolShape]) -> int:
        """Return the bytes of a page in L2, summed over `pools`."""
        return sum(pool.shape.page(self.page_tokens).nbytes for pool in pools)

    def stored_nbytes(self, pools: Sequence[PoolShape]) -> int:
        """Return the bytes of a page in L3 with its headers, summed over `pools`."""
        return self.page_nbytes(pools) + FRAME_NBYTES * len(pools)

    def host_blocks(self, nbytes: int, pools: Sequence[PoolShape] | None = None) -> int:
        """Return how many whole blocks an L2 of this size holds."""
        return nbytes // self.page_nbytes(pools or self.pools) // self.pages_per_block

    def storage_blocks(self, nbytes: int, pools: Sequence[PoolShape] | None = None) -> int:
        """Return how many whole blocks an L3 of this size holds."""
        return nbytes // self.stored_nbytes(pools or self.pools) // self.pages_per_block
