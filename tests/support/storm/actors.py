"""The processes of a storm: writers, readers and checkers. A signal may end each of them anywhere."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeAlias, TypeVar

from clocks import Stopwatch
from pages import blank, hash_of, page, space

from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.storage import HiCacheStorage
from storm.world import World

T = TypeVar("T")
Operation: TypeAlias = Literal["batch_get", "batch_set", "batch_delete"]

NBYTES = 16 << 10
SPACES = (space(page_nbytes=NBYTES), space(page_nbytes=NBYTES, pool="draft"))
PAGES = 48
"""How many pages each key space has. All processes use the same ones."""
_MOST_A_CALL = 8
_NO_ANSWER = (StorageTimeout, StorageUnavailable)
_START_LIMIT_S = 30.0
_DAY_S = 86_400.0
_STEPS_S = (-365 * _DAY_S, -_DAY_S, -600.0, -1.0, 0.0, 1.0, 600.0, _DAY_S, 365 * _DAY_S)
_STEP_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Begin:
    """A call that a process is about to make."""

    operation: Operation
    space: int
    numbers: list[int]
    began_s: float


@dataclass(frozen=True, slots=True)
class End:
    """The answer to the last `Begin`, or None after an error."""

    answer: list[bool] | None
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Orders:
    """What a process of a storm has to do."""

    seed: int
    steps_clock: bool = False
    """True: the process's wall clock is stepped between its calls."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The pages that a process has read."""

    space: int
    asked: list[int]
    found: list[int]
    wrong: list[int]


def contents(key_space: int, number: int) -> bytes:
    """Return the bytes of a page, which no other page has."""
    return page(NBYTES, seed=1000 * key_space + number).tobytes()


def _answer(call: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a call. Repeat the call while a server starts."""
    until_s = time.monotonic() + _START_LIMIT_S
    while True:
        try:
            return call(*arguments)
        except _NO_ANSWER:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.01)


def _opened(world: World) -> HiCacheStorage:
    storage = _answer(world.open)
    for each in SPACES:
        _answer(storage.open_space, each)
    return storage


class WallClock:
    """A wall clock in place of this process's own. It shows the kernel's time until it is stepped."""

    def __init__(self) -> None:
        self._offset_s = 0.0
        now_s, now_ns = time.time, time.time_ns
        time.time = lambda: now_s() + self._offset_s
        time.time_ns = lambda: now_ns() + int(self._offset_s * 1e9)

    def step(self, chance: random.Random) -> None:
        """Step forward or back, up to a year from the kernel's clock."""
        self._offset_s = chance.choice(_STEPS_S)


def _calls(orders: Orders) -> Iterator[random.Random]:
    """Yield the random choices for each call. Step the clock between some calls."""
    chance = random.Random(orders.seed)
    clock = WallClock() if orders.steps_clock else None
    while True:
        if clock is not None and chance.random() < _STEP_SHARE:
            clock.step(chance)
        yield chance


def write(world: World, orders: Orders, writer: int, writers: int, link: Connection) -> None:
    """Set and delete the pages of one writer until a signal ends the process."""
    own = range(writer, PAGES, writers)
    with _opened(world) as storage:
        for chance in _calls(orders):
            key_space = chance.randrange(len(SPACES))
            numbers = chance.sample(own, chance.randint(1, _MOST_A_CALL))
            operation: Operation = "batch_delete" if chance.random() < 0.2 else "batch_set"
            pages = [page(NBYTES, seed=1000 * key_space + number) for number in numbers]
            arguments = (SPACES[key_space], [hash_of(number) for number in numbers])
            link.send(Begin(operation, key_space, numbers, time.monotonic()))
            watch = Stopwatch()
            answer = None
            with suppress(*_NO_ANSWER):
                answer = (
                    storage.batch_delete(*arguments)
                    if operation == "batch_delete"
                    else storage.batch_set(*arguments, pages)
                )
            link.send(End(answer, watch.so_far_s()))


def read(world: World, orders: Orders, link: Connection) -> None:
    """Read pages until a signal ends the process. Report the calls, and wrong pages."""
    with _opened(world) as storage:
        for chance in _calls(orders):
            key_space = chance.randrange(len(SPACES))
            numbers = chance.sample(range(PAGES), chance.randint(1, _MOST_A_CALL))
            link.send(Begin("batch_get", key_space, numbers, time.monotonic()))
            watch = Stopwatch()
            sight = None
            with suppress(*_NO_ANSWER):
                sight = see(storage, key_space, numbers)
            answer = None if sight is None else [number in sight.found for number in numbers]
            link.send(End(answer, watch.so_far_s()))
            if sight is not None and sight.wrong:
                link.send(sight)


def check(world: World, link: Connection) -> None:
    """Report all pages as soon as the store answers."""
    with _opened(world) as storage:
        for key_space in range(len(SPACES)):
            for start in range(0, PAGES, _MOST_A_CALL):
                numbers = range(start, min(PAGES, start + _MOST_A_CALL))
                link.send(_answer(see, storage, key_space, numbers))


def see(storage: HiCacheStorage, key_space: int, numbers: Sequence[int]) -> Sight:
    """Read pages into blank memory, and compare them with the bytes that they must have."""
    targets = [blank(NBYTES) for _ in numbers]
    hashes = [hash_of(number) for number in numbers]
    hits = storage.batch_get(SPACES[key_space], hashes, targets)
    found = [number for number, hit in zip(numbers, hits, strict=True) if hit]
    wrong = [
        number
        for number, hit, target in zip(numbers, hits, targets, strict=True)
        if hit and target.tobytes() != contents(key_space, number)
    ]
    return Sight(key_space, list(numbers), found, wrong)
