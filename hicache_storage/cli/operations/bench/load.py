"""Run threads that read, write and look up pages for some time, and record each operation's figures."""

from __future__ import annotations

import enum
import random
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hicache_storage.cli.operations.bench.latencies import Latencies
from hicache_storage.cli.operations.bench.pages import PageBuffers
from hicache_storage.cli.operations.rate_limit import RateLimit
from hicache_storage.page_store import PoolSpec, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.cli.operations.bench.pages import Hashes
    from hicache_storage.cli.progress import Meter
    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store import PageStore

_TICK_S = 0.2
_PAUSE_S = 0.1
"""How long a thread pauses after a call that the open breaker refused, so that it does not spin."""

_WITHOUT_LATENCY = frozenset({Verdict.UNAVAILABLE, Verdict.ERROR, Verdict.BREAKER_OPEN})
"""Verdicts of calls that the store did not carry out. The latency of a time-out is its deadline."""

_Bytes = Counter[int]


class Operation(enum.Enum):
    """A kind of call."""

    READ = "read"
    WRITE = "write"
    LOOK_UP = "look-up"
    DELETE = "delete"
    """A thread that writes also deletes its oldest pages, so that the store does not grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """The flags of a run."""

    page_sizes: Sequence[int]
    page_tokens: int
    threads: Sequence[int]
    """The number of threads of each load."""
    batch_pages: int
    """Pages in one call."""
    mix: Mapping[Operation, float]
    """The weight of each operation."""
    duration_s: float | None
    """Seconds that each load lasts."""
    pages: int | None
    """Pages in all calls of a load together, instead of a duration."""
    working_set_nbytes: int
    """Bytes of pages written before the loads, and the most that a load leaves in the store."""
    timeout_s: float
    rate_pages_per_s: int | None = None
    """At most so many pages a second in all calls of a load together. None: as fast as possible."""

    def as_json(self) -> dict[str, Any]:
        """Return the settings that two runs must share before they can be compared."""
        return {
            "page_tokens": self.page_tokens,
            "batch_pages": self.batch_pages,
            "mix": {operation.value: weight for operation, weight in self.mix.items()},
            "working_set_nbytes": self.working_set_nbytes,
            "timeout_s": self.timeout_s,
            "rate_pages_per_s": self.rate_pages_per_s,
        }


@dataclass(slots=True)
class Figures:
    """The figures of one operation's calls."""

    latencies: Latencies = field(default_factory=Latencies)
    verdicts: Counter[Verdict] = field(default_factory=Counter[Verdict])
    """The number of pages by verdict."""
    calls: int = 0
    nbytes_by_second: _Bytes = field(default_factory=_Bytes)
    """Bytes of correct pages, by the second of the load in which their call ended."""
    slowest_s_by_second: dict[int, float] = field(default_factory=dict[int, float])
    """The latency of the slowest call that ended in each second of the load."""

    def merge(self, other: Figures) -> None:
        """Add the calls of `other`."""
        self.latencies.merge(other.latencies)
        self.verdicts.update(other.verdicts)
        self.calls += other.calls
        self.nbytes_by_second.update(other.nbytes_by_second)
        for second, slowest_s in other.slowest_s_by_second.items():
            self.note_latency(second, slowest_s)

    def note_latency(self, second: int, latency_s: float) -> None:
        """Keep the latency of a call if it is the slowest that ended in this second."""
        slowest = self.slowest_s_by_second
        slowest[second] = max(slowest.get(second, 0.0), latency_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of a load."""

    elapsed_s: float
    cpu_s: float
    """Processor time of this process, over all its threads."""
    operations: Mapping[Operation, Figures]
    written: Sequence[str]
    """The hashes of pages that were written, or may have been written, and may still be in the store."""


@dataclass(frozen=True, slots=True)
class Target:
    """The pages that a load works on."""

    store: PageStore
    space: KeySpace
    stored: Sequence[str]
    """The hashes of the pages that reads can find."""
    hashes: Hashes
    """The hashes of the pages to write."""


def measure(
    target: Target, load: BenchSettings, threads: int, meter: Meter, stop: threading.Event
) -> Measured:
    """Run a load with some threads until it ends, or until `stop`. Wait for the calls under way."""
    shared, page_nbytes = _Shared(target, load, stop), target.space.page_nbytes
    most_nbytes = load.working_set_nbytes // threads
    workers = [_Worker(shared, number, most_nbytes) for number in range(threads)]
    if load.pages is not None:
        meter.begin(load.pages * page_nbytes)
    cpu_s, shown = time.process_time(), 0
    shared.begin()
    with ThreadPoolExecutor(threads, thread_name_prefix="hicache-bench") as pool:
        futures = [pool.submit(worker.run) for worker in workers]
        try:
            while wait(futures, _TICK_S).not_done:
                done = sum(worker.pages for worker in workers)
                meter.advance(done - shown, (done - shown) * page_nbytes)
                shown = done
                if shared.ended():
                    shared.rate.stop()
        finally:
            shared.halt.set()
            shared.rate.stop()
        for future in futures:
            future.result()
    elapsed_s, cpu_s = shared.elapsed_s(), time.process_time() - cpu_s
    figures: dict[Operation, Figures] = {}
    for worker in workers:
        for operation, own in worker.figures.items():
            figures.setdefault(operation, Figures()).merge(own)
    written = [one for worker in workers for one in worker.written()]
    return Measured(elapsed_s, cpu_s, figures, written)


class _Shared:
    """The state that a load's threads share. Thread-safe."""

    def __init__(self, target: Target, load: BenchSettings, stop: threading.Event) -> None:
        self.store, self.space, self.stored = target.store, target.space, target.stored
        self.load = load
        self.buffers = PageBuffers(target.store, target.space, load.batch_pages)
        self.halt = threading.Event()
        self.hashes = target.hashes
        self.rate = RateLimit(load.rate_pages_per_s)
        self._stop = stop
        self._left = load.pages
        self._lock = threading.Lock()
        self._began_s = time.monotonic()

    def begin(self) -> None:
        self._began_s = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def ended(self) -> bool:
        late = self.load.duration_s is not None and self.elapsed_s() >= self.load.duration_s
        return late or self._stop.is_set() or self.halt.is_set()

    def take_pages(self) -> int:
        """Return the number of pages for the next call. 0 if the load has used up its pages."""
        with self._lock:
            if self._left is None:
                return self.load.batch_pages
            taken = min(self._left, self.load.batch_pages)
            self._left -= taken
            return taken


class _Worker:
    """One thread of a load, and its calls."""

    def __init__(self, shared: _Shared, number: int, most_nbytes: int) -> None:
        self._shared = shared
        self._random = random.Random(number)
        self._operations = [*shared.load.mix]
        self._weights = [*shared.load.mix.values()]
        self._written: deque[list[str]] = deque()
        self._undeleted: list[str] = []
        load = shared.load
        batch_nbytes = load.batch_pages * shared.space.page_nbytes
        self._most_batches = max(1, most_nbytes // batch_nbytes)
        self.figures: dict[Operation, Figures] = {}
        self.pages = 0

    def run(self) -> None:
        """Make calls until the load ends."""
        shared = self._shared
        while not shared.ended() and (pages := shared.take_pages()):
            shared.rate.wait(pages)
            if shared.ended():
                break
            (operation,) = self._random.choices(self._operations, self._weights)
            verdicts = self._call(operation, pages)
            self.pages += pages
            if Verdict.BREAKER_OPEN in verdicts:
                shared.halt.wait(_PAUSE_S)

    def written(self) -> list[str]:
        """Return the hashes of pages that this thread may have left in the store."""
        return [*self._undeleted, *(one for batch in self._written for one in batch)]

    def _call(self, operation: Operation, pages: int) -> list[Verdict]:
        if operation is Operation.WRITE:
            if len(self._written) >= self._most_batches:
                self._delete()
            return self._write(self._shared.hashes.take(pages))
        start = self._random.randrange(max(1, len(self._shared.stored) - pages + 1))
        hashes = self._shared.stored[start : start + pages]
        return self._read(hashes) if operation is Operation.READ else self._look_up(hashes)

    def _read(self, hashes: Sequence[str]) -> list[Verdict]:
        buffers = self._shared.buffers
        transfer = buffers.to_read(hashes)
        began_s = time.monotonic()
        outcome = self._shared.store.load([transfer])
        elapsed_s = time.monotonic() - began_s
        verdicts = buffers.proved(hashes, outcome.verdicts[0])
        return self._note(Operation.READ, verdicts, elapsed_s)

    def _write(self, hashes: list[str]) -> list[Verdict]:
        buffers = self._shared.buffers
        transfer = buffers.to_write(hashes)
        self._written.append(hashes)
        began_s = time.monotonic()
        outcome = self._shared.store.save([transfer])
        elapsed_s = time.monotonic() - began_s
        return self._note(Operation.WRITE, outcome.verdicts[0], elapsed_s)

    def _look_up(self, hashes: Sequence[str]) -> list[Verdict]:
        pools = [PoolSpec(space=self._shared.space)]
        began_s = time.monotonic()
        match = self._shared.store.match(hashes, pools, past_gaps=True)
        elapsed_s = time.monotonic() - began_s
        absent = match.failures[0] or Verdict.MISS
        verdicts = [Verdict.OK if there else absent for there in match.present[0]]
        return self._note(Operation.LOOK_UP, verdicts, elapsed_s)

    def _delete(self) -> None:
        hashes = self._written.popleft()
        began_s = time.monotonic()
        gone = self._shared.store.delete(self._shared.space, hashes)
        elapsed_s = time.monotonic() - began_s
        if gone < len(hashes):
            self._undeleted += hashes
        verdicts = [Verdict.OK] * gone + [Verdict.ERROR] * (len(hashes) - gone)
        self._note(Operation.DELETE, verdicts, elapsed_s)

    def _note(
        self, operation: Operation, verdicts: list[Verdict], elapsed_s: float
    ) -> list[Verdict]:
        figures = self.figures.setdefault(operation, Figures())
        figures.calls += 1
        figures.verdicts.update(verdicts)
        second = int(self._shared.elapsed_s())
        if not _WITHOUT_LATENCY & {*verdicts}:
            figures.latencies.add(elapsed_s)
            figures.note_latency(second, elapsed_s)
        if operation in (Operation.READ, Operation.WRITE):
            nbytes = verdicts.count(Verdict.OK) * self._shared.space.page_nbytes
            figures.nbytes_by_second[second] += nbytes
        return verdicts
