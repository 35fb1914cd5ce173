"""The encrypted backend against bare AES-256-GCM of the same library over the same pages.

python benchmarks/encrypted.py [--sizes KIB,KIB] [--rounds N] [--json FILE]

The wrapped store of `encrypted` does nothing, so that a row is the cost of sealing alone: its set
leaves the sealed pages in the buffer that the next get of the same batch is lent. The rows over
`memory` have a store that copies pages.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from _harness import (
    MIB,
    Aim,
    Candidate,
    Report,
    Section,
    argument_parser,
    interleave,
    machine_facts,
    page_hashes_of,
    size_text,
    sizes,
)
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hicache_backends.encrypted import EncryptedSettings, EncryptedStorage
from hicache_backends.memory import MemoryStorage

from hicache_storage.keys import KeySpace, Shard
from hicache_storage.page import Page
from hicache_storage.testing import WrapperStorage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.storage import HiCacheStorage

BATCH_NBYTES = 32 * MIB
"""The largest call of a page store."""
FRAME_NBYTES = 128
TAG_NBYTES = 16
LEAST = 0.8
LIMIT = "AESGCM"
OURS = "encrypted"
FRAMED = "encrypted, framed"
KEY = bytes(range(32))


class Nowhere(WrapperStorage):
    """A storage that answers True and does nothing."""

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:  # noqa: ARG002
        return [True] * len(hashes)

    def batch_get(
        self,
        space: KeySpace,  # noqa: ARG002
        hashes: Sequence[str],
        pages: Sequence[Page],  # noqa: ARG002
    ) -> list[bool]:
        return [True] * len(hashes)

    def batch_set(
        self,
        space: KeySpace,  # noqa: ARG002
        hashes: Sequence[str],
        pages: Sequence[Page],  # noqa: ARG002
    ) -> list[bool]:
        return [True] * len(hashes)


class Batch:
    """Pages of random bytes, and the memory that they are read back into."""

    def __init__(self, page_nbytes: int, *, header_nbytes: int = 0) -> None:
        self.page_nbytes = page_nbytes
        self.count = BATCH_NBYTES // page_nbytes
        self.header_nbytes = header_nbytes
        random = np.random.default_rng(1)
        self.sent = random.integers(0, 256, (self.count, page_nbytes), dtype=np.uint8)
        self.got = np.zeros_like(self.sent)

    def pages(self, rows: Any) -> list[Page]:
        """Return pages of one segment, or of a header and the rest."""
        cut = self.header_nbytes
        return [Page(row[:cut], row[cut:]) if cut else Page(row) for row in rows]

    def check(self) -> None:
        if not np.array_equal(self.sent, self.got):
            raise RuntimeError("other bytes were read back")
        self.got[:] = 0


class Moves:
    """The moves of the pages of a batch, in one direction. Every turn is the same."""

    def __init__(self, batch: Batch, *, is_get: bool) -> None:
        self._batch = batch
        self._is_get = is_get

    def prepare(self, turn: int) -> None:
        """Do nothing."""

    def run(self) -> None:
        self._get() if self._is_get else self._set()

    def check(self) -> None:
        if not self._is_get:
            self._get()
        self._batch.check()

    def _set(self) -> None:
        raise NotImplementedError

    def _get(self) -> None:
        raise NotImplementedError


class Bare(Moves):
    """AES-256-GCM with one key: a call of the library for each page, into memory that is there."""

    name = LIMIT

    def __init__(self, batch: Batch, *, is_get: bool) -> None:
        super().__init__(batch, is_get=is_get)
        self._cipher = AESGCM(KEY)
        sealed = np.zeros((batch.count, batch.page_nbytes + TAG_NBYTES), dtype=np.uint8)
        self._sent, self._got, self._sealed = map(views, (batch.sent, batch.got, sealed))
        self._nonces = [os.urandom(12) for _ in range(batch.count)]
        self._about = bytes(48)
        self._set()

    def _set(self) -> None:
        for nonce, page, sealed in zip(self._nonces, self._sent, self._sealed, strict=True):
            self._cipher.encrypt_into(nonce, page, self._about, sealed)

    def _get(self) -> None:
        for nonce, page, sealed in zip(self._nonces, self._got, self._sealed, strict=True):
            self._cipher.decrypt_into(nonce, sealed, self._about, page)


class Store(Moves):
    """A storage, or an encrypted one, that moves one batch in one call."""

    def __init__(self, name: str, storage: HiCacheStorage, batch: Batch, *, is_get: bool) -> None:
        super().__init__(batch, is_get=is_get)
        self.name = name
        self._storage = storage
        self._space = KeySpace(
            model="meta-llama/Llama-3.1-8B-Instruct",
            dtype="bfloat16",
            layout="page_first",
            page_tokens=64,
            page_nbytes=batch.page_nbytes,
            shard=Shard(layers=(0, 32), heads=(0, 8)),
        )
        self._hashes = page_hashes_of(name, 0, batch.count)
        self._sent, self._got = batch.pages(batch.sent), batch.pages(batch.got)
        self._set()

    def _set(self) -> None:
        _all(self._storage.batch_set(self._space, self._hashes, self._sent))

    def _get(self) -> None:
        _all(self._storage.batch_get(self._space, self._hashes, self._got))


class Lookup:
    """The names of a batch of pages."""

    name = "exists"

    def __init__(self, space: KeySpace, count: int) -> None:
        self._storage, self._space = encrypted(Nowhere(MemoryStorage())), space
        self._hashes = page_hashes_of(self.name, 0, count)

    def prepare(self, turn: int) -> None:
        """Do nothing: every turn is the same."""

    def run(self) -> None:
        _all(self._storage.batch_exists(self._space, self._hashes))

    def check(self) -> None:
        """Do nothing: `run` has looked at the answers."""


def encrypted(inner: HiCacheStorage) -> EncryptedStorage:
    """Return an encrypted storage around `inner`."""
    config = {"backend": "memory", "keys": {"k": {"env": "KEY"}}, "current_key": "k"}
    return EncryptedStorage(inner, EncryptedSettings.parse("encrypted", config), {"k": KEY})


def bench(report: Report, page_nbytes: int, rounds: int, *, is_get: bool) -> Section:
    """Measure gets or sets of pages of one size."""
    plain = Batch(page_nbytes)
    framed = Batch(page_nbytes, header_nbytes=FRAME_NBYTES)
    stores = {
        OURS: (encrypted(Nowhere(MemoryStorage())), plain),
        FRAMED: (encrypted(Nowhere(MemoryStorage())), framed),
        "memory": (MemoryStorage(), plain),
        "encrypted over memory": (encrypted(MemoryStorage()), plain),
    }
    candidates: list[Candidate] = [
        Bare(plain, is_get=is_get),
        *(Store(name, store, batch, is_get=is_get) for name, (store, batch) in stores.items()),
    ]
    return report.add(
        Section(
            title=f"{'get' if is_get else 'set'}, {plain.count} pages of {size_text(page_nbytes)}",
            unit="GB/s",
            work=BATCH_NBYTES / 1e9,
            seconds=interleave(candidates, rounds),
            baselines=[LIMIT],
        )
    )


def bench_names(report: Report, rounds: int) -> None:
    """Measure how fast the names of pages are sealed."""
    space = KeySpace(
        model="m", dtype="bfloat16", layout="page_first", page_tokens=64, page_nbytes=MIB,
        shard=Shard(layers=(0, 1)),
    )  # fmt: skip
    count = 4096
    report.add(
        Section(
            title=f"exists, {count} pages, of a store that does nothing",
            unit="million pages/s",
            work=count / 1e6,
            seconds=interleave([Lookup(space, count)], rounds),
            baselines=[],
        )
    )


def views(rows: Any) -> list[memoryview]:
    """Return the bytes of each row of an array."""
    return [Page(row).segments[0] for row in rows]


def _all(answers: Sequence[bool]) -> None:
    if not all(answers):
        raise RuntimeError("a page was refused or missed")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--sizes", type=sizes, default="64,256,1024,4096", metavar="KIB,KIB")
    parser.set_defaults(rounds=31)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    report = Report(machine_facts(distributions=["cryptography", "numpy"]))
    report.print_facts()
    for page_nbytes in options.sizes:
        for is_get in (False, True):
            section = bench(report, page_nbytes, options.rounds, is_get=is_get)
            for name in (OURS, FRAMED):
                report.aims.append(
                    Aim(f"{section.title}: {name} / {LIMIT}", LEAST, section.ratio(name, LIMIT))
                )
    bench_names(report, options.rounds)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
