"""A remote cache behind a bad network: every call takes time, and some pages are lost."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from hicache_conformance.selftest.references.dict_store import DictSettings, DictStore
from hicache_storage.errors import StorageTimeout
from hicache_storage.settings import Field
from hicache_storage.storage import Capabilities, HiCacheStorage, Retention

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from hicache_conformance.selftest.references.dict_store import Stored
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

_FORGOTTEN_EVERY = 16
"""Of so many sets, one page will be forgotten."""
_REMEMBERED_CALLS = 3
"""After so many further calls, that page is gone."""


class SlowSettings(DictSettings):
    """The config of `SlowStore`."""

    delay_s: float = Field(default=0.005, ge=0, allow_inf_nan=False)
    """How long each call takes."""


class SlowStore(DictStore):
    """A store whose calls are round trips. Every 16th page that is set is gone three calls later.

    Its own methods: `_travel` waits; `_forget` removes the pages that are due.
    """

    capabilities = Capabilities(
        retention=Retention.BEST_EFFORT, max_batch=32, max_page_nbytes=1 << 20
    )

    def __init__(self, settings: SlowSettings) -> None:
        super().__init__(settings)
        self._delay_s = settings.delay_s
        self._timeout_s = settings.timeout_s
        self._closing = threading.Event()
        self._calls = 0
        self._sets = 0
        self._doomed: deque[tuple[int, Hashable]] = deque()
        """Pairs of a call's number and the page that is forgotten after it, in that order."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(SlowSettings.parse("slow", config))

    def close(self) -> None:
        self._closing.set()
        super().close()

    def remove_space(self, space_id: str) -> int:
        return HiCacheStorage.remove_space(self, space_id)

    def _begin(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page] | None = None
    ) -> None:
        super()._begin(space, hashes, pages)
        self._travel()
        self._forget()

    def _travel(self) -> None:
        if self._delay_s > self._timeout_s:
            self._closing.wait(self._timeout_s)
            self.ensure_open()
            raise StorageTimeout(
                f"no answer within timeout_s = {self._timeout_s}: it is set too low"
            )
        self._closing.wait(self._delay_s)

    def _forget(self) -> None:
        with self._lock:
            self.ensure_open()
            self._calls += 1
            while self._doomed and self._doomed[0][0] < self._calls:
                self._drop(self._doomed.popleft()[1])

    def _put(self, key: Hashable, stored: Stored) -> None:
        super()._put(key, stored)
        self._sets += 1
        if self._sets % _FORGOTTEN_EVERY == 0:
            self._doomed.append((self._calls + _REMEMBERED_CALLS, key))
