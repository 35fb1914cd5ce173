"""Storages of `hf3fs` for tests, with their index in a Redis server."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from hicache_backends.hf3fs import Hf3fsStorage
from hicache_backends.hf3fs.layout import Geometry
from pages import blank, hash_of, page, space
from servers import RedisServer

from hicache_storage import KeySpace

SPACE = space()
SLOT_NBYTES = Geometry(SPACE).slot_nbytes
HASHES = [hash_of(number) for number in range(64)]


def opened(server: RedisServer, root: Path, **config: Any) -> Hf3fsStorage:
    config = {"path": str(root), "index": server.url, "timeout_s": 20, **config}
    storage = Hf3fsStorage.from_config(config)
    storage.open_space(SPACE)
    return storage


def stored(storage: Hf3fsStorage, numbers: range, key_space: KeySpace = SPACE) -> None:
    pages = [page(seed=n) for n in numbers]
    hashes = [hash_of(n) for n in numbers]
    assert [True] * len(pages) == storage.batch_set(key_space, hashes, pages)


def hits(storage: Hf3fsStorage, numbers: range) -> list[bool]:
    """Return for each page whether it is a hit. A hit must have the right bytes."""
    targets = [blank() for _ in numbers]
    verdicts = storage.batch_get(SPACE, [hash_of(n) for n in numbers], targets)
    for number, hit, target in zip(numbers, verdicts, targets, strict=True):
        assert not hit or target.tobytes() == page(seed=number).tobytes()
    return verdicts


def index_of(storage: Hf3fsStorage) -> Any:
    return storage._mount.get().index


@contextmanager
def client_of(server: RedisServer) -> Generator[Any, None, None]:
    """Yield a client of redis-py for a test, without types, because redis-py lacks many."""
    with redis.Redis(port=server.port) as client:
        yield client
