"""The `hf3fs` backend against the disk's own limit and against SGLang's `HiCacheHF3FS`, in one process.

    python benchmarks/hf3fs.py [--sizes KIB,KIB] [--rounds N] [--quick] [--json FILE] [--path DIRECTORY]

`make bench-hf3fs` makes an environment that has SGLang's backend; elsewhere its rows are left out.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _sglang
from _harness import (
    MIB,
    Report,
    console,
    machine_facts,
    page_hashes_of,
)
from _hf3fs_stores import PlainSlots, SGLangHf3fsStore
from _our_stores import in_directory, pages_in_directory
from _store import Memory
from file import BATCH_PAGES, ROUNDS, Bench, Get, aim, parse, read_back

if TYPE_CHECKING:
    from collections.abc import Sequence

    from file import StoreFactory

THREADS = 4
SGLANG = SGLangHf3fsStore.name
# Space for two marks and a frame in each slot, a block each.
_BESIDE_NBYTES = 3 * 4096


class SetFull:
    """Writes each batch into the same full store. Every page takes the slot of another one."""

    def __init__(self, factory: StoreFactory, bench: Bench) -> None:
        self._bench = bench
        self.store = bench.open(factory, bench.directory())
        self.name = self.store.name
        self._hashes: list[str] = []
        for number in range(1, bench.capacity_pages // BATCH_PAGES + 2):
            self.store.prepare_set(page_hashes_of(self.name, -number, BATCH_PAGES))
            self.store.set()

    def prepare(self, turn: int) -> None:
        self._hashes = page_hashes_of(self.name, turn, BATCH_PAGES)
        self._bench.source.stamp(turn)
        self.store.prepare_set(self._hashes)

    def run(self) -> None:
        self.store.set()

    def check(self) -> None:
        read_back(self.store, self._hashes, self._bench.source)


def factories(bench: Bench, *, direct: bool) -> list[StoreFactory]:
    """Return the candidates with slots, with O_DIRECT or buffered."""
    plain = partial(PlainSlots, direct=direct, capacity_pages=bench.capacity_pages)
    capacity_nbytes = bench.capacity_pages * (bench.page_nbytes + _BESIDE_NBYTES)
    how = "O_DIRECT" if direct else "buffered"
    ours: dict[str, Any] = {
        "direct": direct,
        "capacity_nbytes": capacity_nbytes,
        "detail": f", {how}",
    }
    return [
        partial(plain, threads=1),
        partial(plain, threads=THREADS),
        partial(in_directory, "hf3fs", **ours),
        partial(pages_in_directory, "hf3fs", checksum="none", **ours),
        partial(pages_in_directory, "hf3fs", checksum="xxh3", **ours),
    ]


def sglang_stores(bench: Bench) -> list[StoreFactory]:
    """Return SGLang's backend, which is buffered with its mock client."""
    if not _sglang.is_installed():
        return []
    return [partial(SGLangHf3fsStore, capacity_pages=bench.capacity_pages)]


def bench_slots(bench: Bench, *, direct: bool) -> None:
    """Measure gets of one batch, and sets of new batches into a full store."""
    how = "O_DIRECT" if direct else "buffered"
    alone = f"plain slots, {how}, 1 thread"
    limit = f"plain slots, {how}, {THREADS} threads"
    chosen = factories(bench, direct=direct) + ([] if direct else sglang_stores(bench))
    for title, kind in (("get", Get), ("set, at capacity", SetFull)):
        candidates = [kind(factory, bench) for factory in chosen]
        section = bench.measure(f"{title}, {how}", candidates, (alone, limit, SGLANG))
        for candidate in candidates:
            candidate.store.close()
        if direct and bench.page_nbytes == MIB:
            aim(bench, section, f"ours: Hf3fsStorage, {how}", alone, 0.85)
            aim(bench, section, f"ours: page store, none, {how}", limit, 0.85)
        aim(bench, section, f"ours: Hf3fsStorage, {how}", SGLANG, 1.0)
        aim(bench, section, f"ours: page store, none, {how}", SGLANG, 1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    root = Path(tempfile.mkdtemp(prefix="hicache-bench-", dir=options.path))
    try:
        libraries = ["numpy", *(["torch", "sglang"] if _sglang.is_installed() else [])]
        report = Report(machine_facts(root, distributions=libraries))
        report.print_facts()
        if not _sglang.is_installed():
            console.print(f"SGLang {_sglang.WHEEL_VERSION} is not here: `make bench-hf3fs` has it")
        for page_nbytes in options.sizes:
            bench = Bench(
                report=report,
                root=root,
                rounds=options.rounds or ROUNDS.get(page_nbytes, 5),
                source=Memory(BATCH_PAGES, page_nbytes),
                destination=Memory(BATCH_PAGES, page_nbytes),
            )
            bench.source.fill(page_nbytes)
            for direct in (True, False):
                bench_slots(bench, direct=direct)
    finally:
        shutil.rmtree(root)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
