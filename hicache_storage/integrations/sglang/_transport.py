"""Move pages between SGLang's host pools and the page store."""

from __future__ import annotations

import time
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.page import Page
from hicache_storage.page_store.results import Verdict
from hicache_storage.request_log import Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.integrations._write_admission import WriteAdmission
    from hicache_storage.integrations.sglang._engine import Indices
    from hicache_storage.integrations.sglang._stored_pool import StoredPool
    from hicache_storage.integrations.sglang._transfer_metrics import TransferMetrics
    from hicache_storage.page_store import PageStore
    from hicache_storage.page_store.results import Outcome, Transfer
    from hicache_storage.request_log import ExplainLog

_UNANSWERED = frozenset((Verdict.TIMEOUT, Verdict.UNAVAILABLE, Verdict.BREAKER_OPEN))


class TransferResult(NamedTuple):
    """The outcome for a batch of pages."""

    moved: list[bool]
    """True for each page that was moved."""
    answered: bool
    """False if the store does not answer. The caller must then try no further batches."""


class Transport:
    """The loads and saves of pages between SGLang's host pools and a store. Thread-safe.

    When a call returns, nothing accesses SGLang's memory any more, and SGLang reuses the host pages.
    """

    def __init__(
        self,
        store: PageStore,
        metrics: TransferMetrics | None,
        timeout_s: float,
        admission: WriteAdmission,
        explain_log: ExplainLog | None = None,
    ) -> None:
        self.store = store
        self.metrics = metrics
        self.writes_replicated = True
        """False if another rank saves the replicated pages. This rank then saves only missing pages."""
        self.admission = admission
        self._explain_log = explain_log
        self._timeout_s = timeout_s

    def load(self, pool: StoredPool, keys: Sequence[str], indices: Indices) -> TransferResult:
        """Load pages into the host pool."""
        transfers, began_s = pool.targets(keys, indices), time.monotonic()
        outcome = self.store.load(transfers)
        result = self._result("prefetch", pool, transfers, outcome, began_s)
        pool.write_back(indices, transfers, result.moved)
        return result

    def save(self, pool: StoredPool, keys: Sequence[str], indices: Indices) -> TransferResult:
        """Save the admitted pages of the host pool.

        Other pages count as moved, because SGLang ends a backup at the first page that is not moved.
        """
        admitted = self.admission.admit(keys, pool.page_nbytes, pool.name)
        if not all(admitted):
            self._explain_refused(pool, keys, admitted)
            places = list(compress(range(len(keys)), admitted))
            keys = [keys[place] for place in places]
            indices = indices.reshape(-1, pool.host.page_size)[places].reshape(-1)
        stored, deadline = 0, Deadline(self._timeout_s)
        if keys and pool.is_replicated and not self.writes_replicated:
            stored = self.store.match(keys, pool.specs()).pages
        saved = TransferResult([True] * stored, answered=True)
        if keys[stored:]:
            transfers = pool.sources(keys[stored:], indices[stored * pool.host.page_size :])
            began_s = time.monotonic()
            left_s = deadline.remaining_s() if stored else None
            outcome = self.store.save(transfers, timeout_s=left_s)
            moved, answered = self._result("backup", pool, transfers, outcome, began_s)
            saved = TransferResult(saved.moved + moved, answered)
        return saved if all(admitted) else _with_refused(admitted, saved)

    def load_flat(
        self, pool: StoredPool, keys: Sequence[str], targets: Sequence[Any]
    ) -> tuple[list[Any], bool]:
        """Load pages into tensors of SGLang. Return the filled tensors, None for others."""
        buffers = [target.contiguous() for target in targets]
        transfers, began_s = pool.flat_transfers(keys, _flats(pool, buffers)), time.monotonic()
        outcome = self.store.load(transfers)
        moved, answered = self._result("prefetch", pool, transfers, outcome, began_s)
        for target, buffer, is_moved in zip(targets, buffers, moved, strict=True):
            if is_moved and buffer is not target:
                target.copy_(buffer)
        filled = [
            target if is_moved else None for target, is_moved in zip(targets, moved, strict=True)
        ]
        return filled, answered

    def save_flat(
        self, pool: StoredPool, keys: Sequence[str], values: Sequence[Any]
    ) -> TransferResult:
        """Save the admitted tensors of SGLang. Other tensors count as moved."""
        admitted = self.admission.admit(keys, pool.page_nbytes, pool.name)
        self._explain_refused(pool, keys, admitted)
        if not any(admitted):
            return TransferResult([True] * len(keys), answered=True)
        keys, values = list(compress(keys, admitted)), list(compress(values, admitted))
        flats = _flats(pool, [value.contiguous() for value in values])
        transfers, began_s = pool.flat_transfers(keys, flats), time.monotonic()
        outcome = self.store.save(transfers)
        return _with_refused(admitted, self._result("backup", pool, transfers, outcome, began_s))

    def _result(
        self,
        direction: str,
        pool: StoredPool,
        transfers: Sequence[Transfer],
        outcome: Outcome,
        began_s: float,
    ) -> TransferResult:
        """Explain and count a move, and return its result."""
        self._explain(direction, pool, transfers, outcome.verdicts, began_s)
        moved = outcome.whole()
        if self.metrics is not None:
            pages = moved.count(True)
            elapsed_s = time.monotonic() - began_s
            self.metrics.add(direction, pages, pages * pool.page_nbytes, elapsed_s)
        return TransferResult(moved, _answered(outcome))

    def _explain(
        self,
        direction: str,
        pool: StoredPool,
        transfers: Sequence[Transfer],
        verdicts: Sequence[Sequence[Verdict]],
        began_s: float,
    ) -> None:
        if self._explain_log is not None:
            self._explain_log.add_pages(
                Operation.LOAD if direction == "prefetch" else Operation.STORE,
                transfers[0].hashes,
                verdicts,
                pool.name,
                elapsed_s=time.monotonic() - began_s,
            )

    def _explain_refused(
        self, pool: StoredPool, keys: Sequence[str], admitted: Sequence[bool]
    ) -> None:
        if self._explain_log is not None and not all(admitted):
            verdicts = [Verdict.OK if kept else Verdict.NOT_ADMITTED for kept in admitted]
            self._explain_log.add_pages(Operation.STORE, keys, [verdicts], pool.name)


def _with_refused(admitted: Sequence[bool], saved: TransferResult) -> TransferResult:
    """Extend the result to all pages. Pages that were not admitted count as moved."""
    moved = iter(saved.moved)
    return TransferResult([not one or next(moved) for one in admitted], saved.answered)


def _answered(outcome: Outcome) -> bool:
    return not any(verdict in _UNANSWERED for verdicts in outcome.verdicts for verdict in verdicts)


def _flats(pool: StoredPool, tensors: Sequence[Any]) -> list[memoryview]:
    if pool.is_marker:  # the tensors of a marker pool are empty
        return [memoryview(bytearray(1)) for _ in tensors]
    return [Page(tensor).segments[0] for tensor in tensors]
