"""Swap the storage for another one while requests run, as an operator would."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import HiCacheError

if TYPE_CHECKING:
    from hicache_storage.controller import CacheController
    from hicache_storage.page_store import PageStore

# Longer than any storage call takes. A call that still runs after it is abandoned.
_DETACH_TIMEOUT_S = 30.0


@dataclass(slots=True, kw_only=True)
class Swap:
    """A thread that detaches one store and attaches another, while the engine goes on."""

    controller: CacheController
    store: PageStore
    """The second store. The caller closes it."""
    drained: bool = False
    """True if all pending writes to the first store had ended when it was detached."""
    attached: bool = False
    error: str | None = None
    """Why the second store could not be attached. The cache then goes on with only L2."""
    took_s: float | None = None
    _thread: threading.Thread | None = field(default=None, init=False)

    def start(self) -> None:
        """Start the swap. Requests may run meanwhile."""
        self._thread = threading.Thread(target=self._run, name="hicache-swap", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until a swap that has started is over."""
        if self._thread is not None:
            self._thread.join()

    def figures(self) -> dict[str, Any]:
        """Return the outcome and the second store's counters, ready for JSON."""
        return {
            "begun": self._thread is not None,
            "drained": self.drained,
            "attached": self.attached,
            "complaint": self.error,
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
            self.error = str(error)
        self.took_s = time.monotonic() - began_s
