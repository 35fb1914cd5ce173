"""A backend that is exchanged for another while requests run, as an operator would do it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import HiCacheError

if TYPE_CHECKING:
    from hicache_storage.controller import CacheController
    from hicache_storage.page_store import PageStore

# Longer than any storage call may take: what still runs then is left behind.
_DETACH_TIMEOUT_S = 30.0


@dataclass(slots=True, kw_only=True)
class Swap:
    """Detaches one store and attaches another, on a thread of its own, while the engine goes on."""

    controller: CacheController
    store: PageStore
    """The store from then on; the caller's."""
    drained: bool = False
    """What was to be written had been, and no call ran any more, when the first store was left."""
    attached: bool = False
    complaint: str | None = None
    """Why the second store could not be attached: the cache went on with L2 alone."""
    took_s: float | None = None
    _thread: threading.Thread | None = field(default=None, init=False)

    def begin(self) -> None:
        """Start the exchange; requests may run meanwhile."""
        self._thread = threading.Thread(target=self._run, name="hicache-swap", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it is over, where it was begun."""
        if self._thread is not None:
            self._thread.join()

    def figures(self) -> dict[str, Any]:
        """What became of it, and the second store's counters."""
        return {
            "begun": self._thread is not None,
            "drained": self.drained,
            "attached": self.attached,
            "complaint": self.complaint,
            "took_s": self.took_s,
            "store": dict(sorted(self.store.stats().items())),
            "storage": dict(sorted(self.store.storage.stats().counters.items())),
        }

    def _run(self) -> None:
        began_s = time.monotonic()
        self.drained = self.controller.detach(drain=True, timeout_s=_DETACH_TIMEOUT_S)
        try:
            self.controller.attach(self.store)
            self.attached = True
        except HiCacheError as error:
            self.complaint = str(error)
        self.took_s = time.monotonic() - began_s
