"""Wrong stores: the times that they tell; KV-010."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.evicting import EvictingStore
from hicache_storage.storage import PageTimes

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from hicache_storage.keys import KeySpace


@caught_by("KV-010:times_follow_the_hashes")
class TimesMoveUp(EvictingStore):
    """The times of present pages come first, and those of absent ones behind them."""

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        return sorted(super().page_times(space, hashes), key=lambda one: one == PageTimes())


@caught_by("KV-010:a_page_just_set_was_written_just_now")
class TimesInKiloseconds(EvictingStore):
    """The time of the last use is divided by 1,000, as if it were milliseconds."""

    def _times(self, key: Hashable) -> PageTimes:
        used_s = super()._times(key).used_at_s
        return PageTimes(used_at_s=None if used_s is None else used_s / 1000)


@caught_by("KV-010:a_get_is_a_use_and_asking_is_none")
class GetsAreNoUse(EvictingStore):
    """A page counts as last used when it was written."""

    def _times(self, key: Hashable) -> PageTimes:
        written_s = super()._times(key).written_at_s
        return PageTimes(written_at_s=written_s, used_at_s=written_s)


@caught_by("KV-010:a_get_is_a_use_and_asking_is_none")
class AskingIsAUse(EvictingStore):
    """Asking for the times of a page counts as a use of it."""

    def _times(self, key: Hashable) -> PageTimes:
        times = super()._times(key)
        self._used_s[key] = time.time()
        return times
