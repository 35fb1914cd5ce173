"""What the parts of one controller share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.controller.agreement import Agreement
    from hicache_storage.controller.entry import Entry
    from hicache_storage.controller.explain import Explanations
    from hicache_storage.controller.host_cache import HostCache
    from hicache_storage.controller.limits import Occupancy
    from hicache_storage.controller.policies import ControllerSettings
    from hicache_storage.controller.pool_set import Bits
    from hicache_storage.controller.tier import Tier
    from hicache_storage.counters import Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One controller's parts, as its requests see them."""

    cache: HostCache
    settings: ControllerSettings
    counters: Counters
    agreement: Agreement
    explanations: Explanations
    occupancy: Occupancy
    tier: Callable[[], Tier | None]
    """The store that is attached now."""
    consider: Callable[[Sequence[Entry]], None]
    """Offers pages to the write policy."""

    vital: Bits
    """The pools without which a page is no hit."""
