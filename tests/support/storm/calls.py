"""Millions of calls through a page store, over a storage and a network that misbehave.

A round opens a store, makes calls from several threads and closes it. `FaultyStorage` fails, delays,
hangs, lies and damages pages between the page store and the storage. If the store has a server, a
proxy delays, cuts, holds, truncates and damages bytes on the way to it. The round checks:

- A page that is OK has its own bytes.
- A call ends within a second after its deadline.
- A store returns no verdict `error`, because the contract names every failure.
- A round leaves no thread, descriptor, connection or unpublished file behind.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from clocks import Stopwatch
from hicache_conformance.tools.network.proxy import FaultProxy
from hicache_conformance.tools.processes.resources import ProcessResources, remaining_after
from pages import blank, hash_of, page, space

from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.page_store import (
    PageStore,
    PageStoreSettings,
    PoolSpec,
    Transfer,
    Verdict,
)
from hicache_storage.testing import Fault, FaultyStorage, Odds
from storm.progress import Progress
from storm.world import World
from storm.worlds import WORLDS

T = TypeVar("T")

CALL_WORLDS = [name for name in WORLDS if not name.endswith("-disk") and name != "redis-failover"]
"""The stores for these calls. All others have the same backends."""
ROUND = 5_000
TIMEOUT_S = 0.5
GRACE_S = 1.0
_THREADS = 4
_NBYTES = 4096
_SPACES = (space(page_nbytes=_NBYTES), space(page_nbytes=_NBYTES, pool="draft"))
_PAGES = 64
_MOST_A_CALL = 8
_LEFT_LIMIT_S = 20.0
_OPEN_LIMIT_S = 30.0
_RETRY_S = 0.01
_SHARES = {
    Fault.RAISE: 0.01,
    Fault.MISS: 0.005,
    Fault.LIE: 0.005,
    Fault.TEAR: 0.005,
    Fault.FLIP: 0.005,
    Fault.DELAY: 0.005,
    Fault.HANG: 0.0005,
}
PLAN = [
    Odds(operation, fault, share)
    for operation in ("batch_exists", "batch_get", "batch_set", "batch_delete")
    for fault, share in _SHARES.items()
]
"""The faults of a storage. Some delays and all hangs last longer than a call may take."""
_QUIET_S = (0.0, 0.2)
"""The time between two faults of the network."""
_FAULT_S = (0.005, 0.1)


def call(
    world: World, progress: Progress, *, calls: int, plan: Sequence[Odds] = tuple(PLAN)
) -> None:
    """Make rounds of calls, until this many calls are made or a round has a finding.

    What the first round of a process leaves is allowed to stay, such as the threads of a native
    library. A later round may start up to `late_threads` of these threads.
    """
    late_threads = world.late_threads
    before: ProcessResources | None = None
    while progress.figures["calls"] < calls and not progress.findings:
        progress.figures["rounds"] += 1
        todo = min(ROUND, calls - progress.figures["calls"])
        _Round(world, progress, todo, plan).run()
        world.settle()
        if before is not None:
            left = remaining_after(before, _LEFT_LIMIT_S)
            for each in [each for each in left if each.startswith("thread ")][:late_threads]:
                left.remove(each)
                late_threads -= 1
            progress.findings += [f"a round left {each}" for each in left]
        before = ProcessResources.current()
        progress.findings += [f"{path} was left behind" for path in world.strays()]
        progress.save()


class _Round:
    """The calls of some threads on one opened store."""

    def __init__(self, world: World, progress: Progress, calls: int, plan: Sequence[Odds]) -> None:
        self._world = world
        self._progress = progress
        self._calls = calls
        self._plan = plan
        self._seed = f"{progress.seed}/{progress.figures['rounds']}"
        self._chance = random.Random(self._seed)
        self._lock = threading.Lock()
        self._contents = {
            (each, number): page(_NBYTES, seed=1000 * place + number).tobytes()
            for place, each in enumerate(_SPACES)
            for number in range(_PAGES)
        }
        self._store: PageStore

    def run(self) -> None:
        """Make the calls, while the network fails."""
        inner = _retried(self._world.open)
        settings = PageStoreSettings(timeout_s=TIMEOUT_S, breaker_failures=1_000_000)
        seed = self._chance.getrandbits(32)
        with FaultyStorage(inner, self._plan, seed=seed, hang_s=2 * TIMEOUT_S) as storage:
            with PageStore(storage, settings) as self._store:
                for each in _SPACES:
                    _retried(partial(self._store.open_space, each))
                self._run_threads()
            for (_, fault), count in storage.struck.items():
                self._progress.figures[f"storage {fault.value}"] += count

    def _run_threads(self) -> None:
        threads = [threading.Thread(target=self._client, args=(n,)) for n in range(_THREADS)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if self._world.proxy is None:
                threads[0].join(0.1)
            else:
                self._disturb(self._world.proxy)
        for thread in threads:
            thread.join()

    def _disturb(self, proxy: FaultProxy) -> None:
        chance = self._chance
        name, fault = chance.choice(_NETWORK_FAULTS)
        time.sleep(chance.uniform(*_QUIET_S))
        fault(proxy, chance)
        time.sleep(chance.uniform(*_FAULT_S))
        proxy.pass_through()
        self._count(f"network {name}")

    def _client(self, number: int) -> None:
        chance = random.Random(f"{self._seed}/{number}")
        for _ in range(self._calls // _THREADS + (number < self._calls % _THREADS)):
            operation = chance.choice(
                (self._load, self._load, self._save, self._match, self._delete)
            )
            key_space = chance.choice(_SPACES)
            numbers = chance.sample(range(_PAGES), chance.randint(1, _MOST_A_CALL))
            try:
                operation(key_space, numbers, Stopwatch())
            except Exception as error:  # noqa: BLE001 - reported
                self._find(f"{operation.__name__[1:]} raised {error!r}")
            self._count("calls")

    def _load(self, key_space: KeySpace, numbers: Sequence[int], watch: Stopwatch) -> None:
        pages = [blank(_NBYTES) for _ in numbers]
        hashes = [hash_of(number) for number in numbers]
        outcome = self._store.load([Transfer(key_space, hashes, pages)])
        self._judge_length("load", watch)
        self._judge_verdicts("load", outcome.verdicts[0])
        for number, loaded, verdict in zip(numbers, pages, outcome.verdicts[0], strict=True):
            if verdict is Verdict.OK:
                self._count("pages read")
                if loaded.tobytes() != self._contents[key_space, number]:
                    self._find(f"page {number} of pool {key_space.pool} has wrong bytes")

    def _save(self, key_space: KeySpace, numbers: Sequence[int], watch: Stopwatch) -> None:
        pages = [Page(bytearray(self._contents[key_space, number])) for number in numbers]
        hashes = [hash_of(number) for number in numbers]
        outcome = self._store.save([Transfer(key_space, hashes, pages)])
        self._judge_length("save", watch)
        self._judge_verdicts("save", outcome.verdicts[0])
        self._count("pages accepted", outcome.verdicts[0].count(Verdict.OK))

    def _match(self, key_space: KeySpace, numbers: Sequence[int], watch: Stopwatch) -> None:
        self._store.match([hash_of(number) for number in numbers], [PoolSpec(space=key_space)])
        self._judge_length("match", watch)

    def _delete(self, key_space: KeySpace, numbers: Sequence[int], watch: Stopwatch) -> None:
        self._store.delete(key_space, [hash_of(number) for number in numbers])
        self._judge_length("delete", watch)

    def _judge_length(self, operation: str, watch: Stopwatch) -> None:
        elapsed_s = watch.so_far_s()
        if elapsed_s > TIMEOUT_S + GRACE_S:
            self._find(f"{operation} took {elapsed_s:.1f} s")

    def _judge_verdicts(self, operation: str, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            if verdict is not Verdict.OK:
                self._count(f"pages {verdict.value}")
        if Verdict.ERROR in verdicts:
            self._find(f"{operation} ended with an error that the contract does not name")

    def _count(self, name: str, times: int = 1) -> None:
        with self._lock:
            self._progress.figures[name] += times

    def _find(self, finding: str) -> None:
        with self._lock:
            self._progress.findings.append(finding)


def _retried(action: Callable[[], T]) -> T:
    """Repeat an opening until it succeeds: faults, and what they leave behind, may hit it."""
    until_s = time.monotonic() + _OPEN_LIMIT_S
    while True:
        try:
            return action()
        except (StorageTimeout, StorageUnavailable):
            if time.monotonic() > until_s:
                raise
            time.sleep(_RETRY_S)


def _reset(proxy: FaultProxy, chance: random.Random) -> None:
    proxy.reset_after(chance.randrange(20_000), direction=chance.choice(("up", "down")))


def _truncate(proxy: FaultProxy, chance: random.Random) -> None:
    proxy.truncate_after(chance.randrange(20_000))


def _flip(proxy: FaultProxy, chance: random.Random) -> None:
    proxy.flip_after(chance.randrange(20_000), direction=chance.choice(("up", "down")))


def _drip(proxy: FaultProxy, chance: random.Random) -> None:
    proxy.drip(chance.uniform(10_000, 200_000))


def _delay(proxy: FaultProxy, chance: random.Random) -> None:
    proxy.delay(chance.uniform(0.001, 0.05))


def _silence(proxy: FaultProxy, chance: random.Random) -> None:
    proxy.go_silent(chance.choice((None, "up", "down")))


def _silence_one(proxy: FaultProxy, _: random.Random) -> None:
    proxy.silence_one()


def _refuse(proxy: FaultProxy, _: random.Random) -> None:
    proxy.refuse()


_NETWORK_FAULTS = [
    ("reset", _reset),
    ("truncate", _truncate),
    ("flip", _flip),
    ("drip", _drip),
    ("delay", _delay),
    ("silence", _silence),
    ("silence of one", _silence_one),
    ("refusal", _refuse),
]
