"""What the parts of one controller share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.controller.admission import PrefetchQuota
    from hicache_storage.controller.attached_store import AttachedStore
    from hicache_storage.controller.cache import HostCache
    from hicache_storage.controller.consensus import Agreement
    from hicache_storage.controller.entry import Entry
    from hicache_storage.controller.explain import Explanations
    from hicache_storage.controller.pool_set import Bits
    from hicache_storage.controller.settings import ControllerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One controller's parts, as its requests see them."""

    cache: HostCache
    settings: ControllerSettings
    counters: Counters
    agreement: Agreement
    explanations: Explanations
    occupancy: PrefetchQuota
    tier: Callable[[], AttachedStore | None]
    """The store that is attached now."""
    consider: Callable[[Sequence[Entry]], None]
    """Offers pages to the write policy."""

    vital: Bits
    """The pools without which a page is no hit."""
