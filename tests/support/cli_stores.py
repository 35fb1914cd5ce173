"""Stores for tests that run the verbs of `hicache`, with pages that an engine could read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from pages import hash_of, page, space

from hicache_storage import HiCacheStorage, KeySpace, open_storage
from hicache_storage.cli import main
from hicache_storage.page_store import PageStore, Transfer

SPACE = space()
DRAFT = space(pool="draft", page_nbytes=512)
BACKENDS = ("file", "redis", "s3", "hf3fs")


@dataclass(frozen=True)
class CliStore:
    """The backend and config of a store."""

    backend: str
    config: dict[str, Any] = field(repr=False)

    @property
    def flags(self) -> list[str]:
        return [
            *("--hicache-storage-backend", self.backend),
            *("--hicache-storage-backend-extra-config", json.dumps(self.config)),
        ]

    @property
    def target_flags(self) -> list[str]:
        """The flags that name this store as the target of a copy."""
        return ["--to-backend", self.backend, "--to-extra-config", json.dumps(self.config)]

    def open(self) -> HiCacheStorage:
        return open_storage(self.backend, self.config)

    def fill(self, numbers: Iterable[int], key_space: KeySpace = SPACE) -> KeySpace:
        """Store framed pages. Return the key space that the store then has."""
        with self.open() as storage:
            return save(storage, numbers, key_space)

    def numbers(self, key_space: KeySpace, limit: int = 200) -> list[int]:
        """Return the numbers of the pages that are there."""
        with self.open() as storage:
            there = storage.batch_exists(key_space, [hash_of(n) for n in range(limit)])
        return [number for number, is_there in enumerate(there) if is_there]

    def break_page(self, number: int, key_space: KeySpace) -> None:
        """Replace a page by one of the same size, with one bit of its payload flipped."""
        with self.open() as storage:
            break_page(storage, number, key_space)


def save(
    storage: HiCacheStorage,
    numbers: Iterable[int],
    key_space: KeySpace = SPACE,
    checksum: Any = "xxh3",
) -> KeySpace:
    """Store framed pages as an engine does. Return the framed key space."""
    from hicache_storage.page_store import PageStoreSettings

    chosen = list(numbers)
    with PageStore(storage, PageStoreSettings(checksum=checksum)) as store:
        store.open_space(key_space)
        pages = [page(key_space.page_nbytes, seed=number) for number in chosen]
        outcome = store.save([Transfer(key_space, [hash_of(n) for n in chosen], pages)])
        assert outcome.arrived() == len(chosen)
        return store.framed(key_space)


def break_page(storage: HiCacheStorage, number: int, key_space: KeySpace) -> None:
    """Replace a page by one of the same size, with one bit of its payload flipped."""
    stored = page(key_space.stored_nbytes)
    assert storage.batch_get(key_space, [hash_of(number)], [stored]) == [True]
    stored.segments[0][-1] ^= 1
    assert storage.batch_delete(key_space, [hash_of(number)]) == [True]
    assert storage.batch_set(key_space, [hash_of(number)], [stored]) == [True]


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    """Run a verb with `--json`. Return its exit code and its document."""
    code = main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)
