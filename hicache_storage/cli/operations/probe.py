"""Write, read, verify and delete pages, to find out whether a store works, and how fast it is."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from hicache_storage.cli.operations.batches import PageMemory, batches, pages_per_batch, trial_space
from hicache_storage.cli.operations.proofs import PageProver, Proof
from hicache_storage.errors import HiCacheError, UnsupportedOperation
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings, PoolSpec, Transfer, Verdict
from hicache_storage.scalars import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage

PROBE_MODEL = "hicache-doctor"
_LOOKUPS = 16
_READS = 5
_READS_S = 2.0
"""After this time there is no further read."""
_TIMEOUT_S = 60.0
_LATE_POLL_S = 0.5
_MOST_LATE_S = 5.0
"""How long to look for pages that arrive late."""
_FINE = frozenset({Proof.OK, Proof.GONE, Proof.NO_CHECKSUM, Proof.NO_FRAME})
_CLOSE_TIMEOUT_S = 10.0
_UNANSWERED = frozenset({Verdict.TIMEOUT, Verdict.BREAKER_OPEN})
"""Verdicts after which a direct call of the storage may never end."""


@dataclass(slots=True)
class Measured:
    """The results of a probe. None: a step failed, or the store does not report the value."""

    pages: int
    page_nbytes: int
    page_tokens: int
    failures: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """The steps that failed, each with its reason."""
    write_nbytes_s: float | None = None
    read_nbytes_s: float | None = None
    round_trip_s: float | None = None
    clock_skew_s: float | None = None
    """How far the time of a page is before the start of its write, or after its end."""
    is_reduced: bool = False
    """True if these are fewer or smaller pages than asked for, because no more fit."""
    is_late: bool = False
    """True if the store did not answer a write in time. It may still carry the write out."""
    is_down: bool = False
    """True if the store did not answer at the end."""
    left_space: str = ""
    """The probe's key space and the reason, if only its pages could be removed."""


def probe(
    storage: HiCacheStorage,
    *,
    pages: int,
    page_nbytes: int,
    page_tokens: int,
    timeout_s: float = _TIMEOUT_S,
) -> Measured:
    """Write, read, verify and delete pages with random hashes. Leave no page behind.

    Each step ends after `timeout_s`, even if the store hangs.
    """
    measured = Measured(pages, page_nbytes, page_tokens)
    space = trial_space(PROBE_MODEL, "doctor", page_nbytes, page_tokens)
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
            left = _delete(store, space, hashes, measured)
            if measured.is_late:
                left = _delete_late(store, space, hashes, min(timeout_s, _MOST_LATE_S))
            if left:
                measured.failures.append(
                    ("delete", f"{left:,} of {counted(pages, 'page')} may be left")
                )
            elif not measured.is_late:
                _remove_space(storage, store.framed(space), measured)
    return measured


def prove(storage: HiCacheStorage, pages: int) -> Measured | None:
    """Read and verify existing pages, from the first key space that has pages.

    Return None if no page is listed. The call does not change a store that was opened read-only.
    """
    for space in storage.spaces() if storage.capabilities.enumerable else ():
        hashes = [info.page_hash for info in islice(storage.scan(space), pages)]
        if not hashes:
            continue
        measured = Measured(len(hashes), space.stored_nbytes, space.page_tokens)
        times: list[float] = []
        for _ in range(_LOOKUPS):
            began_s = time.monotonic()
            storage.batch_exists(space, hashes[:1])
            times.append(time.monotonic() - began_s)
        measured.round_trip_s = statistics.median(times)
        measured.read_nbytes_s = _fastest(partial(_proved, storage, space, hashes, measured))
        return measured
    return None


def _proved(
    storage: HiCacheStorage, space: KeySpace, hashes: list[str], measured: Measured
) -> float | None:
    """Read and verify pages. Return the speed in bytes per second. None if a page is wrong."""
    memory = PageMemory(space, len(hashes), storage.capabilities.alignment)
    prover, proofs = PageProver(storage, space), list[Proof]()
    began_s = time.monotonic()
    for batch in batches(hashes, pages_per_batch(space, storage)):
        proofs += [page.proof for page in prover.read(batch, memory.views(len(batch)))]
    elapsed_s = time.monotonic() - began_s
    wrong = Counter(proof.value for proof in proofs if proof not in _FINE)
    if not wrong:
        return len(hashes) * space.stored_nbytes / max(elapsed_s, 1e-9)
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(wrong.items()))
    measured.failures.append(("read", f"of {counted(len(hashes), 'page')}: {reasons}"))
    return None


def _fastest(read: Callable[[], float | None]) -> float | None:
    """Return the highest speed of several reads. None if one of them failed.

    A machine that is busy for a moment makes a single read of a few small pages slow.
    """
    end_s, best = time.monotonic() + _READS_S, 0.0
    for _ in range(_READS):
        speed = read()
        if speed is None:
            return None
        best = max(best, speed)
        if time.monotonic() > end_s:
            break
    return best


def _delete(store: PageStore, space: KeySpace, hashes: list[str], measured: Measured) -> int:
    """Delete the probe's pages. Return how many may be left."""
    deleted = store.delete(space, hashes)
    left = store.present(space, hashes)
    measured.is_down = None in left
    return max(len(hashes) - deleted, len(hashes) - left.count(False))


def _delete_late(store: PageStore, space: KeySpace, hashes: list[str], most_s: float) -> int:
    """Find and delete pages that the store writes after their timeout."""
    end_s = time.monotonic() + most_s
    while time.monotonic() < end_s:
        time.sleep(min(_LATE_POLL_S, most_s))
        there = store.present(space, hashes)
        if None in there:
            break
        if True in there:
            store.delete(space, hashes)
    return len(hashes) - store.present(space, hashes).count(False)


def _remove_space(storage: HiCacheStorage, space: KeySpace, measured: Measured) -> None:
    try:
        storage.remove_space(space.id)
    except UnsupportedOperation:
        return
    except HiCacheError as error:
        measured.left_space = f"{space.id} of model {PROBE_MODEL} stays, without pages: {error}"


class _Probe:
    """The steps of a probe. If a step fails, the probe ends."""

    def __init__(
        self, store: PageStore, space: KeySpace, hashes: list[str], measured: Measured
    ) -> None:
        self._store = store
        self._space = space
        self._hashes = hashes
        self._measured = measured
        framed = store.framed(space)
        memory = PageMemory(framed, len(hashes), store.storage.capabilities.alignment)
        self._pages = self._payloads(memory)
        memory.replace()  # so that a read cannot find what was written in its memory
        self._read = self._payloads(memory)

    def run(self) -> None:
        for page in self._pages:
            for segment in page.segments:
                segment[:] = os.urandom(segment.nbytes)
        written = [page.tobytes() for page in self._pages]
        began_s = time.time()
        self._measured.write_nbytes_s = self._moved("write", self._pages)
        if self._measured.write_nbytes_s is None:
            return
        ended_s = time.time()
        if not self._look_up():
            return
        self._compare_clocks(began_s, ended_s)
        self._measured.read_nbytes_s = _fastest(partial(self._moved, "read", self._read))
        read = [page.tobytes() for page in self._read]
        if self._measured.read_nbytes_s is not None and written != read:
            self._measured.failures.append(("read", "a page came back with wrong bytes"))

    def _payloads(self, memory: PageMemory) -> list[Page]:
        views = memory.views(len(self._hashes))
        return [Page(view[self._store.frame_nbytes :]) for view in views]

    def _moved(self, step: str, pages: list[Page]) -> float | None:
        """Return a step's speed in bytes per second. None if the step failed."""
        transfer = Transfer(self._space, self._hashes, pages)
        began_s = time.monotonic()
        outcome = self._store.save([transfer]) if step == "write" else self._store.load([transfer])
        elapsed_s = time.monotonic() - began_s
        (verdicts,) = outcome.verdicts
        wrong = {*verdicts} - {Verdict.OK}
        self._measured.is_late |= step == "write" and Verdict.TIMEOUT in wrong
        if wrong:
            reasons = ", ".join(sorted(verdict.value for verdict in wrong))
            count = len(verdicts) - verdicts.count(Verdict.OK)
            self._fail(
                step, f"{count:,} of {counted(len(verdicts), 'page')} failed: {reasons}", wrong
            )
            return None
        return len(verdicts) * self._space.page_nbytes / max(elapsed_s, 1e-9)

    def _look_up(self) -> bool:
        """Measure look-ups of one page. Return False if a look-up failed."""
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
                self._measured.failures.append(("look-up", "a page that was written is missing"))
                return False
        self._measured.round_trip_s = statistics.median(times)
        return True

    def _fail(self, step: str, reason: str, verdicts: set[Verdict]) -> None:
        """Record the failure of a step, with the storage's own message if there is one."""
        words = "" if verdicts & _UNANSWERED else self._words(step)
        self._measured.failures.append((step, f"{reason}; {words}" if words else reason))

    def _words(self, step: str) -> str:
        """Return the message of the error that the storage itself raises in a step, or nothing."""
        storage, framed = self._store.storage, self._store.framed(self._space)
        if not storage.capabilities.scatter_gather:
            return ""
        hashes, stored = self._hashes[:1], [Page(bytearray(framed.stored_nbytes))]
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

    def _compare_clocks(self, began_s: float, ended_s: float) -> None:
        framed = self._store.framed(self._space)
        try:
            (times,) = self._store.storage.page_times(framed, self._hashes[:1])
        except HiCacheError:
            return
        at_s = times.written_at_s or times.used_at_s
        if at_s is not None:
            self._measured.clock_skew_s = min(at_s - began_s, max(at_s - ended_s, 0.0))
