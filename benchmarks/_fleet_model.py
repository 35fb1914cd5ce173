"""A simulation of engines that share one store: routers, tiers, and writes that take time.

Each engine has one cache of its own (L1 and L2 together), which is an LRU list of blocks. L3 is
another LRU list, which all engines share. A request waits for its engine, finds the leading blocks
that either tier has, loads those that only L3 has, and computes the rest. Then the computed blocks
that its engine lacked are offered to L3. The capacities, and how and in which order each tier is
used, are the same as in `hicache plan` (`hicache_storage.planning.tiers`) with `write_through`.

A block is in L3 once its write has ended. Until then other engines do not find it, so they compute
it too.
"""

from __future__ import annotations

import enum
import hashlib
import heapq
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_storage.page_store.admission import Admission, AdmissionSettings
from hicache_storage.planning.accesses import Accesses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.replay.trace import Request

BUCKETS = 256
"""How many values the first two digits of a page hash have. `redis` places pages by these digits."""


class Router(enum.StrEnum):
    """How the engine that serves a request is chosen."""

    ROUND_ROBIN = "round_robin"
    PREFIX = "prefix"
    """By the hash of the prompt's first blocks."""
    LEAST_LOADED = "least_loaded"
    """The engine with the fewest blocks waiting or in service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """The fleet. Sizes are in blocks, times in seconds per block."""

    engines: int
    router: Router = Router.ROUND_ROBIN
    prefix_blocks: int = 1
    """For the router `prefix`: the hash of this many leading blocks chooses the engine."""
    host_blocks: int
    """L1 and L2 of one engine together."""
    storage_blocks: int
    """The size of L3. 0: there is no L3."""
    compute_s: float = 0.0
    load_s: float = 0.0
    write_s: float = 0.0
    look_first: bool = True
    """Ask L3 for a block before writing it, as the backends do."""
    second_use: bool = False
    """Write a block only when an engine offers it for the second time."""
    pages_per_block: int = 1


@dataclass(slots=True)
class FleetFigures:
    """What a run counted, in blocks."""

    blocks: int = 0
    host_hits: int = 0
    storage_hits: int = 0
    computed: int = 0
    offered: int = 0
    """Computed blocks that were missing in the engine's own tiers."""
    refused: int = 0
    """Offered blocks that admission kept out of L3."""
    found: int = 0
    """Offered blocks that L3 already had when it was asked before the write."""
    written: int = 0
    duplicates: int = 0
    """Written blocks that L3 already had when the write ended."""
    again: int = 0
    """Written blocks that L3 once had but has evicted."""
    by_several: int = 0
    """Different blocks that more than one engine has written."""
    reads: Counter[int] = field(default_factory=Counter[int])
    """Loaded pages, by the bucket of their hash."""
    writes: Counter[int] = field(default_factory=Counter[int])
    """Written pages, by the bucket of their hash."""
    waited_s: float = 0.0
    """How many seconds all requests together waited for their engines."""


class Lru:
    """An LRU list of blocks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def use(self, blocks: Iterable[int]) -> None:
        """Make these blocks the newest, in this order. Then evict the oldest blocks."""
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


@dataclass(slots=True)
class _Engine:
    number: int
    host: Lru
    admission: Admission | None
    waiting: deque[tuple[float, tuple[int, ...]]] = field(default_factory=deque[Any])
    pending_blocks: int = 0
    is_busy: bool = False


class _Fleet:
    def __init__(self, settings: FleetSettings) -> None:
        self.settings = settings
        self.figures = FleetFigures()
        self._storage = Lru(settings.storage_blocks)
        self._engines = [
            _Engine(
                number,
                Lru(settings.host_blocks),
                Admission(AdmissionSettings(second_use=True)) if settings.second_use else None,
            )
            for number in range(settings.engines)
        ]
        self._order = count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._writers: dict[int, int] = {}
        """Which engine has written each block, or -1 for several engines."""
        self._next = 0

    def run(self, prompts: Sequence[tuple[float, tuple[int, ...]]]) -> FleetFigures:
        """Serve all prompts. Each comes with its arrival time in seconds."""
        for arrival_s, blocks in prompts:
            self._at(arrival_s, self._arrive, arrival_s, blocks)
        while self._events:
            now_s, _, handle, arguments = heapq.heappop(self._events)
            handle(now_s, *arguments)
        self.figures.by_several = sum(writer < 0 for writer in self._writers.values())
        return self.figures

    def _at(self, time_s: float, handle: Callable[..., None], *arguments: Any) -> None:
        """Schedule an event. Events at the same time are handled in the order of scheduling."""
        heapq.heappush(self._events, (time_s, next(self._order), handle, arguments))

    # --- events ----------------------------------------------------------------------------------

    def _arrive(self, now_s: float, arrival_s: float, blocks: tuple[int, ...]) -> None:
        engine = self._route(blocks)
        engine.waiting.append((arrival_s, blocks))
        engine.pending_blocks += len(blocks)
        if not engine.is_busy:
            self._start(now_s, engine)

    def _start(self, now_s: float, engine: _Engine) -> None:
        """Begin an engine's next request: find its prefix, and load what only L3 has."""
        engine.is_busy = bool(engine.waiting)
        if not engine.is_busy:
            return
        arrival_s, blocks = engine.waiting.popleft()
        in_host = {block for block in blocks if block in engine.host}
        found = 0
        while found < len(blocks) and (blocks[found] in in_host or blocks[found] in self._storage):
            found += 1
        loaded = [block for block in blocks[:found] if block not in in_host]
        self._storage.use(reversed(loaded))
        self._count_pages(self.figures.reads, loaded)
        computed = len(blocks) - found
        figures = self.figures
        figures.waited_s += now_s - arrival_s
        figures.blocks += len(blocks)
        figures.host_hits += found - len(loaded)
        figures.storage_hits += len(loaded)
        figures.computed += computed
        took_s = computed * self.settings.compute_s + len(loaded) * self.settings.load_s
        self._at(now_s + took_s, self._finish, engine, blocks, found, in_host)

    def _finish(
        self,
        now_s: float,
        engine: _Engine,
        blocks: tuple[int, ...],
        found: int,
        in_host: set[int],
    ) -> None:
        """End a request: its blocks are now in L2, and the new ones are offered to L3."""
        engine.host.use((*reversed(blocks[:found]), *reversed(blocks[found:])))
        offered = [block for block in blocks[found:] if block not in in_host]
        self.figures.offered += len(offered)
        if self.settings.storage_blocks:
            admitted = self._admitted(engine, offered)
            wanted = [block for block in admitted if not self._finds(block)]
            wait_s = len(wanted) * self.settings.write_s
            self._at(now_s + wait_s, self._written, engine, wanted)
        engine.pending_blocks -= len(blocks)
        self._at(now_s, self._start, engine)

    def _written(self, _: float, engine: _Engine, blocks: list[int]) -> None:
        """End the write of some blocks of one engine."""
        for block in blocks:
            if block in self._storage:
                self.figures.duplicates += 1
            elif block in self._writers:
                self.figures.again += 1
            if self._writers.setdefault(block, engine.number) != engine.number:
                self._writers[block] = -1
        self.figures.written += len(blocks)
        self._storage.use(reversed(blocks))
        self._count_pages(self.figures.writes, blocks)

    # --- parts -----------------------------------------------------------------------------------

    def _route(self, blocks: tuple[int, ...]) -> _Engine:
        match self.settings.router:
            case Router.ROUND_ROBIN:
                return self._in_turn(lambda _: 0)
            case Router.PREFIX:
                last = min(self.settings.prefix_blocks, len(blocks)) - 1
                return self._engines[blocks[last] % len(self._engines) if blocks else 0]
            case Router.LEAST_LOADED:
                return self._in_turn(lambda engine: engine.pending_blocks)

    def _in_turn(self, load: Callable[[_Engine], int]) -> _Engine:
        """Return the engine with the least load. Among equally loaded engines, take the next in turn."""
        first = self._next
        turns = (*self._engines[first:], *self._engines[:first])
        engine = min(turns, key=load)
        self._next = (engine.number + 1) % len(self._engines)
        return engine

    def _admitted(self, engine: _Engine, blocks: list[int]) -> list[int]:
        if engine.admission is None:
            return blocks
        verdicts = engine.admission.admit([f"{block:032x}" for block in blocks], 1)
        self.figures.refused += verdicts.count(False)
        return [block for block, verdict in zip(blocks, verdicts, strict=True) if verdict]

    def _finds(self, block: int) -> bool:
        """Ask L3 for a block before writing it. If the block is there, this counts as a use."""
        is_there = self.settings.look_first and block in self._storage
        if is_there:
            self.figures.found += 1
            self._storage.use([block])
        return is_there

    def _count_pages(self, counts: Counter[int], blocks: Iterable[int]) -> None:
        for block in blocks:
            counts.update(page_buckets(block, self.settings.pages_per_block))


def simulate(requests: Sequence[Request], settings: FleetSettings, speed: float) -> FleetFigures:
    """Serve the requests of a trace, `speed` times as fast as they came."""
    return _Fleet(settings).run(prompts_of(requests, speed))


def prompts_of(
    requests: Sequence[Request], speed: float = 1.0
) -> list[tuple[float, tuple[int, ...]]]:
    """Return the arrival and blocks of each request.

    A block's number is a hash of its whole prefix.
    """
    names = Accesses.of(requests).names.tolist()
    prompts: list[tuple[float, tuple[int, ...]]] = []
    start = 0
    for request in requests:
        end = start + len(request.blocks)
        prompts.append((request.arrival_s / speed, tuple(names[start:end])))
        start = end
    return prompts


def page_buckets(block: int, pages: int) -> bytes:
    """Return the bucket of each page of a block. Page hashes are uniform, so the buckets are, too."""
    return hashlib.blake2b(block.to_bytes(8), digest_size=pages).digest()


def max_over_mean(counts: Counter[int], servers: Sequence[tuple[float, Sequence[int]]]) -> float:
    """Return the load of the busiest server, divided by the mean load.

    Args:
        counts: Pages by bucket.
        servers: For each key space, the bytes of a page and the server of each bucket.
    """
    number = 1 + max(max(table) for _, table in servers)
    load = np.zeros(number)
    pages = np.array([counts[bucket] for bucket in range(BUCKETS)], float)
    for nbytes, table in servers:
        np.add.at(load, np.array(table), pages * nbytes)
    return float(load.max() / load.mean()) if load.any() else 0.0
