"""Compare the `file` backend with the machine's own limit and SGLang's `HiCacheFile`, in one process.

    python benchmarks/file.py [--quick] [--cold] [--power] [--json FILE] [--path DIRECTORY]

`make bench-file` makes an environment that has SGLang's file backend; elsewhere its rows are left out.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _sglang
from _disk import drop_cache, empty_files, spread_directories, used_nbytes
from _harness import KIB, MIB, Parser, Report, Section, page_hashes_of, scratch, size_text
from _our_stores import in_directory
from _plain_files import (
    Memcpy,
    OpenedFiles,
    OpenFiles,
    PlainFiles,
    RecycledRing,
    SyncedFiles,
    UnlinkedRing,
)
from _sglang_file_store import HiCacheFileStore
from _store import BatchRun, Memory, memories

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    from _store import Store

    StoreFactory: TypeAlias = Callable[[Path, Memory, Memory], Store]

BATCH_PAGES = 128
ROUNDS = {64 * KIB: 15, 1 * MIB: 7, 4 * MIB: 3}
# With more data, the kernel would slow writers down until it has written dirty pages back.
CAPACITY_PAGES = {64 * KIB: 4096, 1 * MIB: 512, 4 * MIB: 160}

OURS = ("ours: FileStorage", "ours: page store, none", "ours: page store, xxh3")
SGLANG = "HiCacheFile"
GET_LIMIT = "preadv"
COLD_LIMIT = "preadv, O_DIRECT, 8 threads"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The shared data of all sections of one page size."""

    report: Report
    root: Path
    rounds: int
    source: Memory
    destination: Memory
    overhead_nbytes: int = 256
    """Space for the frame and the trailer that a store adds to a page."""
    index_nbytes: int = KIB
    """The most bytes in a full store's files that are not pages."""

    @property
    def page_nbytes(self) -> int:
        return self.source.page_nbytes

    @property
    def capacity_pages(self) -> int:
        return CAPACITY_PAGES.get(self.page_nbytes, 4 * BATCH_PAGES)

    @property
    def capacity_nbytes(self) -> int:
        return self.capacity_pages * (self.page_nbytes + self.overhead_nbytes)

    def directory(self) -> Path:
        """Return a new empty directory."""
        return Path(tempfile.mkdtemp(dir=self.root))

    def open(self, factory: StoreFactory, directory: Path) -> Store:
        return factory(directory, self.source, self.destination)

    def measure(
        self, title: str, candidates: Sequence[BatchRun], baselines: Sequence[str]
    ) -> Section:
        return self.report.measure(
            f"{title}, {BATCH_PAGES} pages of {size_text(self.page_nbytes)}",
            candidates,
            self.rounds,
            work=self.source.gb,
            baselines=baselines,
        )


class Get(BatchRun):
    """A candidate that reads one batch repeatedly."""

    def __init__(self, factory: StoreFactory, bench: Bench) -> None:
        self._directory = bench.directory()
        super().__init__(bench.open(factory, self._directory), "get", repeats=True)

    def close(self) -> None:
        self.store.close()
        empty_files(self._directory)


class ColdGet(Get):
    """A candidate that reads one batch repeatedly, each time from the disk."""

    def prepare(self, turn: int) -> None:
        super().prepare(turn)
        drop_cache(self._directory)


class SetInEmpty(BatchRun):
    """A candidate that writes each batch into a new store in an empty directory."""

    def __init__(self, factory: StoreFactory, bench: Bench) -> None:
        self._factory = factory
        self._bench = bench
        super().__init__(self._opened(), "set")
        self._retire()

    def prepare(self, turn: int) -> None:
        self.store = self._opened()
        super().prepare(turn)

    def check(self) -> None:
        super().check()
        self._retire()

    def _opened(self) -> Store:
        self._directory = self._bench.directory()
        return self._bench.open(self._factory, self._directory)

    def _retire(self) -> None:
        self.store.close()
        empty_files(self._directory)


class SetMore(BatchRun):
    """A candidate that writes each batch into the same store, below its capacity or at it."""

    def __init__(self, factory: StoreFactory, bench: Bench, *, full: bool) -> None:
        self._bench = bench
        self._full = full
        self._directory = bench.directory()
        super().__init__(bench.open(factory, self._directory), "set")
        for batch in self._filling():
            self.store.prepare_set(batch)
            self.store.set()
            self._make_room()

    def check(self) -> None:
        super().check()
        self._make_room()

    def close(self) -> None:
        self.store.close()
        empty_files(self._directory)

    def _filling(self) -> list[list[str]]:
        """Return batches that fill the store, or that create each fan-out directory it may have."""
        if self._full:
            batches = self._bench.capacity_pages // BATCH_PAGES + 1
            return [
                page_hashes_of(self.name, -number, BATCH_PAGES) for number in range(1, batches + 1)
            ]
        tails = [tail for turn in (-1, -2) for tail in page_hashes_of(self.name, turn, BATCH_PAGES)]
        hashes = [f"{byte:02x}{tail[2:]}" for byte, tail in enumerate(tails)]
        return [hashes[:BATCH_PAGES], hashes[BATCH_PAGES:]]

    def _make_room(self) -> None:
        if not self._full:
            empty_files(self._directory)
        elif (held := used_nbytes(self._directory)) > (
            self._bench.capacity_nbytes + self._bench.index_nbytes
        ):
            raise RuntimeError(f"{self.name} holds {held} bytes: more than its capacity")


def bench_get(bench: Bench) -> None:
    """Measure reading pages from the kernel's cache into mapped memory."""
    factories: list[StoreFactory] = [
        Memcpy,
        OpenFiles,
        partial(OpenFiles, threads=2),
        OpenedFiles,
        *sglang_stores(),
        *ours(),
    ]
    gets = [Get(factory, bench) for factory in factories]
    section = bench.measure("get", gets, (GET_LIMIT, SGLANG))
    for get in gets:
        get.close()
    if bench.page_nbytes == MIB:
        for name, least in zip(OURS, (0.85, 0.85, 0.6), strict=True):
            bench.report.aim(section, name, GET_LIMIT, least)
    for name in OURS:
        bench.report.aim(section, name, SGLANG, 1.0)


def bench_cold_get(bench: Bench) -> None:
    """Measure reading pages that are not in the kernel's cache."""
    factories: list[StoreFactory] = [
        *[partial(OpenFiles, threads=threads, direct=True) for threads in (1, 2, 4, 8)],
        OpenFiles,
        partial(OpenFiles, threads=4),
        *sglang_stores()[:1],
        *ours(),
    ]
    gets = [ColdGet(factory, bench) for factory in factories]
    section = bench.measure("get, not in the page cache", gets, (COLD_LIMIT, SGLANG))
    for get in gets:
        get.close()
    if bench.page_nbytes >= MIB:
        for name in OURS:
            bench.report.aim(section, name, COLD_LIMIT, 0.95)
    for name in OURS:
        bench.report.aim(section, name, SGLANG, 1.0)


def bench_set_in_empty(bench: Bench) -> None:
    """Measure the first batch of a new store, including the creation of its directories."""
    factories: list[StoreFactory] = [PlainFiles, *sglang_stores()[:1], *ours()]
    candidates = [SetInEmpty(factory, bench) for factory in factories]
    section = bench.measure("set, empty store", candidates, (PlainFiles.name, SGLANG))
    for name in OURS:
        bench.report.aim(section, name, SGLANG, 1.0)


def bench_set_below_capacity(bench: Bench) -> None:
    """Measure a batch of new pages in a used store that has free space."""
    factories: list[StoreFactory] = [Memcpy, PlainFiles, *sglang_stores(), *ours()]
    section = bench_set_more(bench, factories, "set, room to spare", PlainFiles.name, full=False)
    for name in OURS:
        bench.report.aim(section, name, PlainFiles.name, 0.8)
        bench.report.aim(section, name, SGLANG, 1.0)


def bench_set_at_capacity(bench: Bench) -> None:
    """Measure a batch of new pages in a full store. Each page evicts another one."""
    capacity = {"capacity_nbytes": bench.capacity_nbytes}
    factories: list[StoreFactory] = [
        partial(RecycledRing, capacity_pages=bench.capacity_pages),
        partial(UnlinkedRing, capacity_pages=bench.capacity_pages),
        *sglang_stores(**capacity)[:1],
        *ours(**capacity),
    ]
    section = bench_set_more(bench, factories, "set, at capacity", RecycledRing.name, full=True)
    for name in OURS:
        bench.report.aim(section, name, SGLANG, 5.0)


def bench_set_synced(bench: Bench) -> None:
    """Measure sets that return after data and names are on disk (`durability = "power"`)."""
    factories: list[StoreFactory] = [SyncedFiles, *ours(durability="power")]
    bench_set_more(bench, factories, "set, synced", SyncedFiles.name, full=False)


def bench_set_more(
    bench: Bench, factories: Sequence[StoreFactory], title: str, limit: str, *, full: bool
) -> Section:
    candidates = [SetMore(factory, bench, full=full) for factory in factories]
    section = bench.measure(title, candidates, (limit, SGLANG))
    for candidate in candidates:
        candidate.close()
    return section


def sglang_stores(capacity_nbytes: int | None = None) -> list[StoreFactory]:
    """Return SGLang's file backend twice: without the copies of SGLang's controller, and with them."""
    if not _sglang.is_installed():
        return []
    return [
        partial(HiCacheFileStore, capacity_nbytes=capacity_nbytes, host_pool=host_pool)
        for host_pool in (False, True)
    ]


def ours(**settings: Any) -> list[StoreFactory]:
    """Return the backend alone, and under the page store without and with checksums."""
    return [
        partial(in_directory, "file", **settings),
        partial(in_directory, "file", checksum="none", **settings),
        partial(in_directory, "file", checksum="xxh3", **settings),
    ]


def benches(
    root: Path, report: Report, options: argparse.Namespace, **fields: Any
) -> Iterator[Bench]:
    """Yield a `Bench` for each page size."""
    for page_nbytes in options.sizes:
        source, destination = memories(BATCH_PAGES, page_nbytes)
        yield Bench(
            report=report,
            root=root,
            rounds=options.rounds or ROUNDS.get(page_nbytes, 5),
            source=source,
            destination=destination,
            **fields,
        )


def parser(doc: str | None) -> Parser:
    return Parser(doc, page_sizes=ROUNDS, multiple=32, quick_rounds=3, path=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--cold", action="store_true", help="measure only gets from the disk")
    options.add_argument("--power", action="store_true", help="also measure synced writes")
    chosen = options.parsed(arguments)
    with scratch(chosen.path) as root:
        report = Report.begin(root, distributions=["torch", "numpy", *_sglang.libraries()])
        spread_directories(root)
        _sglang.tell("bench-file")
        for bench in benches(root, report, chosen):
            bench_cold_get(bench)
            if chosen.cold:
                continue
            bench_get(bench)
            bench_set_in_empty(bench)
            bench_set_below_capacity(bench)
            bench_set_at_capacity(bench)
            if chosen.power:
                bench_set_synced(bench)
        report.finish(chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
