"""Backends with memory that its owner revokes, before a call or while it runs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hf3fs_roots import counted
from hicache_backends.hf3fs import reader as hf3fs_reader
from lent_pages import lent_page, revoked
from pages import hash_of, page, space

from hicache_storage.backend_support.revocable import AtomicRevocable
from hicache_storage.page import Page
from hicache_storage.registry import open_storage
from hicache_storage.storage import HiCacheStorage

NBYTES = 1 << 20
SPACE = space(page_nbytes=NBYTES)
HASHES = [hash_of(number) for number in range(8)]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "file-crash": ("file", {"durability": "crash"}),
    "file-power": ("file", {"durability": "power"}),
    "hf3fs-buffered": ("hf3fs", {"direct": False}),
    "hf3fs-direct": ("hf3fs", {"direct": True}),
    "hf3fs-mount": ("hf3fs", {"direct": False}),
    "memory": ("memory", {}),
    "encrypted": (
        "encrypted",
        {"backend": "memory", "keys": {"a": {"env": "A_KEY"}}, "current_key": "a", "name_key": "a"},
    ),
}
lent = partial(lent_page, NBYTES)


def _is_not_local(_: str) -> bool:
    return False


def opened(root: Path, kind: str, **config: Any) -> HiCacheStorage:
    place = {} if kind in ("memory", "encrypted") else {"path": str(root)}
    storage = open_storage(kind, {**place, **config})
    storage.open_space(SPACE)
    return storage


@pytest.fixture(params=KINDS)
def storage(
    request: pytest.FixtureRequest, root: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HiCacheStorage]:
    if request.param == "hf3fs-mount":  # a failed write may be carried out later there
        monkeypatch.setattr(hf3fs_reader, "is_local", _is_not_local)
    monkeypatch.setenv("A_KEY", "41" * 32)
    kind, config = KINDS[request.param]
    with opened(root, kind, **config) as storage:
        yield storage


def kept_of_pages(root: Path, storage: HiCacheStorage) -> object:
    """Return the names of page files, half-written ones included, or the counts of slots."""
    if not root.exists():
        return [page.page_hash for page in storage.scan(SPACE)]
    if (root / "index.sqlite").exists():
        return counted(root)
    large = NBYTES // 2
    return [path.name for path in root.rglob("*") if path.is_file() and path.stat().st_size > large]


def test_revocable_pages_are_stored_and_read(storage: HiCacheStorage) -> None:
    assert [True] * 8 == storage.batch_set(SPACE, HASHES, [lent(seed) for seed in range(8)])
    targets = [lent() for _ in HASHES]

    assert [True] * 8 == storage.batch_get(SPACE, HASHES, targets)
    assert [page(NBYTES, seed).tobytes() for seed in range(8)] == [
        target.tobytes() for target in targets
    ]


@pytest.mark.parametrize("storage", [kind for kind in KINDS if kind != "encrypted"], indirect=True)
def test_a_revocable_page_gets_its_digest(storage: HiCacheStorage) -> None:
    plain = Page(bytearray(NBYTES))
    storage.batch_set(SPACE, HASHES[:1], [lent(0)])
    targets = [lent(), plain]
    for target in targets:
        target.digest_skip = 1001
        storage.batch_get(SPACE, HASHES[:1], [target])

    assert targets[0].digest == targets[1].digest is not None


def test_a_page_that_was_revoked_is_not_read(storage: HiCacheStorage) -> None:
    storage.batch_set(SPACE, HASHES[:2], [lent(0), lent(1)])
    targets = [lent(revocable=revoked()), lent()]

    assert [False, True] == storage.batch_get(SPACE, HASHES[:2], targets)
    assert lent().tobytes() == targets[0].tobytes()
    assert [True, True] == storage.batch_exists(SPACE, HASHES[:2])
    assert not any(storage.stats().counters.values())


def test_a_page_that_was_revoked_is_not_stored_and_leaves_nothing(
    storage: HiCacheStorage, root: Path
) -> None:
    pages = [lent(0, revoked()), lent(1)]

    assert [False, True] == storage.batch_set(SPACE, HASHES[:2], pages)
    assert [False, True] == storage.batch_exists(SPACE, HASHES[:2])
    assert kept_of_pages(root, storage) in (HASHES[1:2], (0, 1, 0))
    assert not any(storage.stats().counters.values())


def test_a_full_file_store_overwrites_old_pages_with_revocable_ones(root: Path) -> None:
    limit = {"capacity_nbytes": 4 * (NBYTES + 64), "durability": "crash"}
    with opened(root, "file", **limit) as storage:
        for number in range(8):
            assert [True] == storage.batch_set(SPACE, HASHES[number : number + 1], [lent(number)])
        assert storage.stats().counters["recycled"] > 0
        assert [False] == storage.batch_set(SPACE, [hash_of(99)], [lent(9, revoked())])
        target = lent()

        assert [True] == storage.batch_get(SPACE, HASHES[7:], [target])
        assert page(NBYTES, 7).tobytes() == target.tobytes()


def test_memory_stays_as_it_is_from_the_revoke_on(storage: HiCacheStorage) -> None:
    storage.batch_set(SPACE, HASHES, [lent(seed) for seed in range(8)])
    for attempt in range(10):
        revocable = AtomicRevocable()
        targets = [lent(revocable=revocable) for _ in HASHES]
        reading = threading.Thread(target=storage.batch_get, args=(SPACE, HASHES, targets))
        reading.start()
        time.sleep(attempt / 5000)
        revocable.revoke()
        for target in targets:
            target.copy_from(b"\xff" * NBYTES)
        reading.join()

        assert [b"\xff" * NBYTES] * 8 == [target.tobytes() for target in targets]


def test_a_page_is_stored_whole_or_not_at_all(storage: HiCacheStorage) -> None:
    for attempt in range(10):
        hashes = [os.urandom(32).hex() for _ in HASHES]
        revocable = AtomicRevocable()
        sources = [lent(seed, revocable) for seed in range(8)]
        writing = threading.Thread(target=storage.batch_set, args=(SPACE, hashes, sources))
        writing.start()
        time.sleep(attempt / 5000)
        revocable.revoke()
        for source in sources:
            source.copy_from(b"\xff" * NBYTES)
        writing.join()
        targets = [Page(bytearray(NBYTES)) for _ in HASHES]
        found = storage.batch_get(SPACE, hashes, targets)

        assert [page(NBYTES, seed).tobytes() for seed, hit in enumerate(found) if hit] == [
            target.tobytes() for target, hit in zip(targets, found, strict=True) if hit
        ]
