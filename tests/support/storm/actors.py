"""The processes of a storm: writers, readers and checkers, each of which a signal may end anywhere."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pages import blank, hash_of, page, space

from hicache_storage.errors import StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from hicache_storage.storage import HiCacheStorage
    from storm.worlds import World

T = TypeVar("T")

NBYTES = 16 << 10
SPACES = (space(page_nbytes=NBYTES), space(page_nbytes=NBYTES, pool="draft"))
PAGES = 48
"""The pages of each key space. All processes use the same ones."""
_MOST_A_CALL = 8
_NO_ANSWER = (StorageTimeout, StorageUnavailable)
_START_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Begin:
    """A call that a writer is about to make."""

    operation: Literal["batch_set", "batch_delete"]
    space: int
    numbers: list[int]


@dataclass(frozen=True, slots=True)
class End:
    """The answer of the call that was begun last; None after an error."""

    answer: list[bool] | None
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Sight:
    """The pages that a process has read."""

    space: int
    asked: list[int]
    found: list[int]
    wrong: list[int]


def contents(key_space: int, number: int) -> bytes:
    """Return the bytes of a page, which are no other page's."""
    return page(NBYTES, seed=1000 * key_space + number).tobytes()


def _answer(call: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a call, which is made again while a server starts."""
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


def write(world: World, seed: int, writer: int, writers: int, link: Connection) -> None:
    """Set and delete the pages of one writer until a signal ends the process."""
    chance, own = random.Random(seed), range(writer, PAGES, writers)
    with _opened(world) as storage:
        while True:
            key_space = chance.randrange(len(SPACES))
            numbers = chance.sample(own, chance.randint(1, _MOST_A_CALL))
            operation: Literal["batch_set", "batch_delete"] = (
                "batch_delete" if chance.random() < 0.2 else "batch_set"
            )
            link.send(Begin(operation, key_space, numbers))
            hashes, began_s = [hash_of(number) for number in numbers], time.monotonic()
            try:
                if operation == "batch_delete":
                    answer = storage.batch_delete(SPACES[key_space], hashes)
                else:
                    pages = [page(NBYTES, seed=1000 * key_space + number) for number in numbers]
                    answer = storage.batch_set(SPACES[key_space], hashes, pages)
            except _NO_ANSWER:
                answer = None
            link.send(End(answer, time.monotonic() - began_s))


def read(world: World, seed: int, link: Connection) -> None:
    """Read pages until a signal ends the process. Report the wrong ones."""
    chance = random.Random(seed)
    with _opened(world) as storage:
        while True:
            numbers = chance.sample(range(PAGES), chance.randint(1, _MOST_A_CALL))
            try:
                sight = see(storage, chance.randrange(len(SPACES)), numbers)
            except _NO_ANSWER:
                continue
            if sight.wrong:
                link.send(sight)


def check(world: World, link: Connection) -> None:
    """Report all pages, once the store answers."""
    with _opened(world) as storage:
        for key_space in range(len(SPACES)):
            for start in range(0, PAGES, _MOST_A_CALL):
                numbers = range(start, min(PAGES, start + _MOST_A_CALL))
                link.send(_answer(see, storage, key_space, numbers))


def see(storage: HiCacheStorage, key_space: int, numbers: Sequence[int]) -> Sight:
    """Read pages into memory that was full of another byte."""
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
