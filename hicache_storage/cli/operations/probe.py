"""Pages that are written, read, proved and deleted, to see that a store works, and how fast."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_storage.cli.operations.batches import PageMemory
from hicache_storage.cli.operations.proofs import framed_page
from hicache_storage.errors import HiCacheError
from hicache_storage.keys import KeySpace, Shard
from hicache_storage.page_store import PageStore, PageStoreSettings, PoolSpec, Transfer, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.storage import HiCacheStorage

_LOOKUPS = 16
_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 10.0
_UNANSWERED = frozenset({Verdict.TIMEOUT, Verdict.BREAKER_OPEN})
"""The verdicts after which a call to the storage itself may never end."""


@dataclass(slots=True)
class Measured:
    """The results of a probe. None: a step failed, or the store does not tell."""

    pages: int
    page_nbytes: int
    page_tokens: int
    failures: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """The steps that failed, each with the reason."""
    write_nbytes_s: float | None = None
    read_nbytes_s: float | None = None
    round_trip_s: float | None = None
    clock_skew_s: float | None = None


def probe_space(page_nbytes: int, page_tokens: int) -> KeySpace:
    """Return the key space of the probe's pages, which no engine uses."""
    return KeySpace(
        model="hicache-doctor",
        dtype="uint8",
        layout="page_first",
        page_tokens=page_tokens,
        page_nbytes=page_nbytes,
        shard=Shard(layers=(0, 1)),
        pool="doctor",
    )


def probe(
    storage: HiCacheStorage,
    *,
    pages: int,
    page_nbytes: int,
    page_tokens: int,
    timeout_s: float = _TIMEOUT_S,
) -> Measured:
    """Write, read, prove and delete pages with random hashes. No page is left behind.

    Each step ends after `timeout_s`, also where the store hangs.
    """
    measured = Measured(pages, page_nbytes, page_tokens)
    space = probe_space(page_nbytes, page_tokens)
    hashes = [os.urandom(32).hex() for _ in range(pages)]
    with ExitStack() as stack:
        store = PageStore(storage, PageStoreSettings(timeout_s=timeout_s))
        stack.callback(store.close, min(timeout_s, _CLOSE_TIMEOUT_S))
        try:
            store.open_space(space)
        except HiCacheError as error:
            measured.failures.append(("write", str(error)))
            return measured
        try:
            _Probe(store, space, hashes, measured).run()
        finally:
            deleted = store.delete(space, hashes)
            left = store.present(space, hashes)
        if deleted < pages or left != [False] * pages:
            count = max(pages - deleted, pages - left.count(False))
            measured.failures.append(("delete", f"{count} of {pages} pages may be left"))
    return measured


class _Probe:
    """The steps of a probe. A step that fails ends the probe."""

    def __init__(
        self, store: PageStore, space: KeySpace, hashes: list[str], measured: Measured
    ) -> None:
        self._store = store
        self._space = space
        self._hashes = hashes
        self._measured = measured
        framed = store.framed(space)
        memory = PageMemory(framed, len(hashes), store.storage.capabilities.alignment)
        self._pages = [framed_page(framed, view) for view in memory.views(len(hashes))]

    def run(self) -> None:
        for page in self._pages:
            for segment in page.payload.segments:
                segment[:] = os.urandom(segment.nbytes)
        written = [page.payload.tobytes() for page in self._pages]
        self._measured.write_nbytes_s = self._moved("write")
        if self._measured.write_nbytes_s is None:
            return
        if not self._look_up():
            return
        self._compare_clocks()
        self._measured.read_nbytes_s = self._moved("read")
        read = [page.payload.tobytes() for page in self._pages]
        if self._measured.read_nbytes_s is not None and written != read:
            self._measured.failures.append(("read", "a page came back with other bytes"))

    def _moved(self, step: str) -> float | None:
        """Return the bytes a second of a step; None if it failed."""
        transfer = Transfer(self._space, self._hashes, self._pages)
        began_s = time.monotonic()
        outcome = self._store.save([transfer]) if step == "write" else self._store.load([transfer])
        elapsed_s = time.monotonic() - began_s
        (verdicts,) = outcome.verdicts
        wrong = {*verdicts} - {Verdict.OK}
        if wrong:
            reasons = ", ".join(sorted(verdict.value for verdict in wrong))
            count = len(verdicts) - verdicts.count(Verdict.OK)
            self._fail(step, f"{count} of {len(verdicts)} pages failed: {reasons}", wrong)
            return None
        return len(verdicts) * self._space.page_nbytes / max(elapsed_s, 1e-9)

    def _look_up(self) -> bool:
        """Measure look-ups of one page. Return False if one failed."""
        times: list[float] = []
        for _ in range(_LOOKUPS):
            began_s = time.monotonic()
            match = self._store.match(self._hashes[:1], [PoolSpec(space=self._space)])
            times.append(time.monotonic() - began_s)
            (failure,) = match.failures
            if failure is not None:
                self._fail("look-up", f"there was no answer: {failure.value}", {failure})
                return False
            if not match.pages:
                self._measured.failures.append(("look-up", "a page that was written is not there"))
                return False
        self._measured.round_trip_s = statistics.median(times)
        return True

    def _fail(self, step: str, reason: str, verdicts: set[Verdict]) -> None:
        """Note the failure of a step, with the storage's own words if it has any."""
        words = "" if verdicts & _UNANSWERED else self._words(step)
        self._measured.failures.append((step, f"{reason}; {words}" if words else reason))

    def _words(self, step: str) -> str:
        """Return the error that the storage itself raises in a step, or nothing."""
        storage, framed = self._store.storage, self._store.framed(self._space)
        if not storage.capabilities.scatter_gather:
            return ""
        hashes, stored = self._hashes[:1], [self._pages[0].stored]
        calls: dict[str, Callable[[], object]] = {
            "write": lambda: storage.batch_set(framed, hashes, stored),
            "look-up": lambda: storage.batch_exists(framed, hashes),
            "read": lambda: storage.batch_get(framed, hashes, stored),
        }
        try:
            calls[step]()
        except HiCacheError as error:
            return str(error)
        return ""

    def _compare_clocks(self) -> None:
        framed = self._store.framed(self._space)
        try:
            (times,) = self._store.storage.page_times(framed, self._hashes[:1])
        except HiCacheError:
            return
        at_s = times.written_at_s or times.used_at_s
        if at_s is not None:
            self._measured.clock_skew_s = at_s - time.time()
