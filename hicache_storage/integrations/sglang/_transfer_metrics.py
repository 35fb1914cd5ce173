"""Count transfers for SGLang's own metrics."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_CALLS = 1000


class TransferMetrics:
    """Pages and GB/s of the latest calls, in both directions. Thread-safe.

    The oldest calls are dropped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, deque[tuple[int, float]]] = {
            "prefetch": deque(maxlen=_MAX_CALLS),
            "backup": deque(maxlen=_MAX_CALLS),
        }

    def add(self, direction: str, pages: int, nbytes: int, elapsed_s: float) -> None:
        """Count a call that moved pages."""
        if pages:
            with self._lock:
                self._calls[direction].append((pages, nbytes / 1e9 / max(elapsed_s, 1e-9)))

    def take(self, storage_metrics: Callable[..., Any]) -> Any:
        """Return SGLang's `StorageMetrics` for all calls since the last `take`."""
        with self._lock:
            taken = {name: list(calls) for name, calls in self._calls.items()}
            for counted in self._calls.values():
                counted.clear()
        fields: dict[str, list[Any]] = {}
        for name, calls in taken.items():
            fields[f"{name}_pgs"] = [pages for pages, _ in calls]
            fields[f"{name}_bandwidth"] = [rate for _, rate in calls]
        return storage_metrics(**fields)
