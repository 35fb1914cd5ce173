"""`hf3fs` and memory that its owner takes back: before a call, and while one runs."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hf3fs_roots import HASHES, NBYTES, SPACE, counted, opened, stored
from hicache_backends.hf3fs import reader as hf3fs_reader
from lent_pages import lent_page, revoked
from pages import blank, page

from hicache_storage.backend_support.revocable import AtomicRevocable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicache_backends.hf3fs import Hf3fsStorage

COUNT = 8


lent = partial(lent_page, NBYTES)


def _is_not_local(_: str) -> bool:
    return False


@pytest.fixture(params=["buffered", "direct", "mount"])
def storage(
    request: pytest.FixtureRequest, root: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hf3fsStorage]:
    if request.param == "mount":  # a failed write may be carried out later there
        monkeypatch.setattr(hf3fs_reader, "is_local", _is_not_local)
    with opened(root, direct=request.param == "direct") as storage:
        yield storage


def test_revocable_pages_are_stored_and_read(storage: Hf3fsStorage) -> None:
    sources = [lent(seed) for seed in range(COUNT)]
    targets = [lent() for _ in sources]

    assert [True] * COUNT == storage.batch_set(SPACE, HASHES[:COUNT], sources)
    assert [True] * COUNT == storage.batch_get(SPACE, HASHES[:COUNT], targets)
    assert [source.tobytes() for source in sources] == [target.tobytes() for target in targets]


def test_a_revocable_page_gets_its_digest(storage: Hf3fsStorage) -> None:
    storage.batch_set(SPACE, HASHES[:1], [lent(0)])
    targets = [lent(), blank(NBYTES)]
    for target in targets:
        target.digest_skip = 1001
        storage.batch_get(SPACE, HASHES[:1], [target])

    assert targets[0].digest == targets[1].digest is not None


def test_a_page_that_was_revoked_is_not_read(storage: Hf3fsStorage) -> None:
    stored(storage, range(2))
    targets = [lent(revocable=revoked()), lent()]

    assert [False, True] == storage.batch_get(SPACE, HASHES[:2], targets)
    assert lent().tobytes() == targets[0].tobytes()
    assert [True, True] == storage.batch_exists(SPACE, HASHES[:2])
    assert {} == storage.stats().counters


def test_a_page_that_was_revoked_is_not_stored_and_leaks_no_slot(
    storage: Hf3fsStorage, root: Path
) -> None:
    pages = [lent(0, revoked()), lent(1)]

    assert [False, True] == storage.batch_set(SPACE, HASHES[:2], pages)
    assert [False, True] == storage.batch_exists(SPACE, HASHES[:2])
    assert (0, 1, 0) == counted(root)
    assert {} == storage.stats().counters


def test_memory_stays_as_it_is_from_the_revoke_on(storage: Hf3fsStorage) -> None:
    stored(storage, range(COUNT))
    for attempt in range(10):
        revocable = AtomicRevocable()
        targets = [lent(revocable=revocable) for _ in range(COUNT)]
        reading = threading.Thread(target=storage.batch_get, args=(SPACE, HASHES[:COUNT], targets))
        reading.start()
        time.sleep(attempt / 5000)
        revocable.revoke()
        for target in targets:
            target.copy_from(b"\xff" * NBYTES)
        reading.join()

        assert [b"\xff" * NBYTES] * COUNT == [target.tobytes() for target in targets]


def test_a_page_is_stored_whole_or_not_at_all(storage: Hf3fsStorage) -> None:
    for attempt in range(10):
        hashes = [os.urandom(32).hex() for _ in range(COUNT)]
        revocable = AtomicRevocable()
        sources = [lent(seed, revocable) for seed in range(COUNT)]
        writing = threading.Thread(target=storage.batch_set, args=(SPACE, hashes, sources))
        writing.start()
        time.sleep(attempt / 5000)
        revocable.revoke()
        for source in sources:
            source.copy_from(b"\xff" * NBYTES)
        writing.join()
        targets = [blank(NBYTES) for _ in hashes]
        found = storage.batch_get(SPACE, hashes, targets)

        assert [page(NBYTES, seed).tobytes() for seed, hit in enumerate(found) if hit] == [
            target.tobytes() for target, hit in zip(targets, found, strict=True) if hit
        ]
