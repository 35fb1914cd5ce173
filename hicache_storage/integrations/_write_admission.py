"""Decide which of an engine's pages are written, with a sketch that is kept in the engine's store."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hicache_storage.page_store.admission import Admission
from hicache_storage.page_store.sketch_store import SketchStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store import PageStore
    from hicache_storage.page_store.admission import AdmissionSettings


class WriteAdmission:
    """The rules that decide which pages of an engine are written, by default all. Thread-safe."""

    def __init__(self, store: PageStore, settings: AdmissionSettings) -> None:
        self._store = store
        self._admission = Admission(settings) if settings.is_enabled else None
        self._lock = threading.Lock()
        self._sketches: SketchStore | None = None
        self._closed = False

    @property
    def is_enabled(self) -> bool:
        """True if some pages may be kept out of the store."""
        return self._admission is not None

    def start(self, owner: KeySpace) -> None:
        """Restore the sketch for the pages of `owner`, in the background. Idempotent."""
        admission = self._admission
        if admission is None or admission.stored_nbytes is None or self._sketches is not None:
            return
        with self._lock:
            if self._sketches is None and not self._closed:
                self._sketches = SketchStore(self._store, admission, owner)
                self._sketches.start()

    def admit(self, hashes: Sequence[str], page_nbytes: int, group: str) -> list[bool]:
        """Return True for each page that is to be written. Groups do not share pages."""
        if self._admission is None:
            return [True] * len(hashes)
        return self._admission.admit(hashes, page_nbytes, group=group)

    def stats(self) -> dict[str, int]:
        """Return the number of pages that were not admitted, by reason."""
        return {} if self._admission is None else self._admission.stats()

    def close(self, timeout_s: float) -> bool:
        """Save the sketch. Return False if that takes longer than `timeout_s`. Idempotent."""
        with self._lock:
            self._closed = True
        return self._sketches is None or self._sketches.close(timeout_s)
