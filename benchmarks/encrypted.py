"""Compare the `encrypted` backend with the same library's bare AES-256-GCM over the same pages.

python benchmarks/encrypted.py [--sizes KIB,KIB] [--rounds N] [--json FILE]

The store that `encrypted` wraps does nothing, so a row shows the cost of sealing alone: a set leaves
the sealed pages in a buffer, and the next get of the same batch uses that buffer. The rows over
`memory` have a store that copies pages.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from _harness import MIB, Candidate, Parser, Report, page_hashes_of, size_text
from _our_stores import OurStorage, key_space
from _store import DIRECTIONS, BatchRun, Memory, Store, memories
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hicache_backends.encrypted import EncryptedSettings, EncryptedStorage
from hicache_backends.memory import MemoryStorage

from hicache_storage.testing import Fault, FaultyStorage, Odds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _store import Direction

    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage

BATCH_NBYTES = 32 * MIB
"""The largest call of a page store."""
SIZES = tuple(kib << 10 for kib in (64, 256, 1024, 4096))
FRAME_NBYTES = 128
TAG_NBYTES = 16
LEAST = 0.8
LIMIT = "AESGCM"
OURS = "encrypted"
FRAMED = "encrypted, framed"
KEY = bytes(range(32))


class Bare(Store):
    """AES-256-GCM with one key: one library call per page, into memory that already exists."""

    name = LIMIT

    def __init__(self, source: Memory, destination: Memory) -> None:
        super().__init__(source, destination)
        self._cipher = AESGCM(KEY)
        self._sealed = Memory(source.pages, source.page_nbytes + TAG_NBYTES).views
        self._nonces = [os.urandom(12) for _ in range(source.pages)]
        self._about = bytes(48)

    def set(self) -> None:
        for nonce, page, sealed in zip(self._nonces, self.source.views, self._sealed, strict=True):
            self._cipher.encrypt_into(nonce, page, self._about, sealed)

    def get(self) -> None:
        for nonce, page, sealed in zip(
            self._nonces, self.destination.views, self._sealed, strict=True
        ):
            self._cipher.decrypt_into(nonce, sealed, self._about, page)


class Lookup(Candidate):
    """A candidate that computes the names of a batch of pages."""

    name = "exists"

    def __init__(self, space: KeySpace, count: int) -> None:
        self._storage, self._space = encrypted(nowhere()), space
        self._hashes = page_hashes_of(self.name, 0, count)

    def run(self) -> None:
        if not all(self._storage.batch_exists(self._space, self._hashes)):
            raise RuntimeError("a page was missed")


def nowhere() -> HiCacheStorage:
    """Return a storage that answers True and does nothing."""
    operations = ("batch_exists", "batch_get", "batch_set")
    return FaultyStorage(MemoryStorage(), [Odds(each, Fault.LIE, 1.0) for each in operations])


def encrypted(inner: HiCacheStorage) -> EncryptedStorage:
    """Return an encrypted storage around `inner`."""
    config = {"backend": "memory", "keys": {"k": {"env": "KEY"}}, "current_key": "k"}
    return EncryptedStorage(inner, EncryptedSettings.parse("encrypted", config), {"k": KEY})


def bench(report: Report, direction: Direction, page_nbytes: int, rounds: int) -> None:
    """Measure gets or sets of pages of one size, and record the aims."""
    batch = memories(BATCH_NBYTES // page_nbytes, page_nbytes)
    stores: list[Store] = [Bare(*batch)]
    for name, storage, header_nbytes in (
        (OURS, encrypted(nowhere()), 0),
        (FRAMED, encrypted(nowhere()), FRAME_NBYTES),
        ("memory", MemoryStorage(), 0),
        ("encrypted over memory", encrypted(MemoryStorage()), 0),
    ):
        stores.append(OurStorage(storage, *batch, name=name, header_nbytes=header_nbytes))
    section = report.measure(
        f"{direction}, {batch[0].pages} pages of {size_text(page_nbytes)}",
        [BatchRun(store, direction, repeats=True) for store in stores],
        rounds,
        work=BATCH_NBYTES / 1e9,
        baselines=[LIMIT],
    )
    for name in (OURS, FRAMED):
        report.aim(section, name, LIMIT, LEAST)


def bench_names(report: Report, rounds: int) -> None:
    """Measure how fast the names of pages are sealed."""
    count = 4096
    report.measure(
        f"exists, {count} pages, of a store that does nothing",
        [Lookup(key_space(MIB), count)],
        rounds,
        work=count / 1e6,
        unit="million pages/s",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = Parser(__doc__, rounds=31, page_sizes=SIZES).parsed(arguments)
    report = Report.begin(distributions=["cryptography", "numpy"])
    for page_nbytes in options.sizes:
        for direction in DIRECTIONS:
            bench(report, direction, page_nbytes, options.rounds)
    bench_names(report, options.rounds)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
