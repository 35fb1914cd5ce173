"""What was moved since SGLang last asked, in its own metrics."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_KEPT = 1000


class TransferMetrics:
    """Calls in both directions: pages and GB/s of each. Thread-safe; old calls fall out unread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, deque[tuple[int, float]]] = {
            "prefetch": deque(maxlen=_KEPT),
            "backup": deque(maxlen=_KEPT),
        }

    def add(self, direction: str, pages: int, nbytes: int, seconds: float) -> None:
        """Count a call that moved pages."""
        if pages:
            with self._lock:
                self._calls[direction].append((pages, nbytes / 1e9 / max(seconds, 1e-9)))

    def take(self, storage_metrics: Callable[..., Any]) -> Any:
        """SGLang's `StorageMetrics` of all calls since the last time."""
        with self._lock:
            taken = {name: list(calls) for name, calls in self._calls.items()}
            for former in self._calls.values():
                former.clear()
        fields: dict[str, list[Any]] = {}
        for name, calls in taken.items():
            fields[f"{name}_pgs"] = [pages for pages, _ in calls]
            fields[f"{name}_bandwidth"] = [rate for _, rate in calls]
        return storage_metrics(**fields)
