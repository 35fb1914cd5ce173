"""The `file` backend against the machine's own limit and against SGLang's `HiCacheFile`, in one process.

    python benchmarks/file.py [--quick] [--power] [--json FILE] [--path DIRECTORY]

`make bench-file` makes an environment that has SGLang's file backend; elsewhere its rows are left out.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _sglang
import numpy as np
from _disk import empty_files, spread_directories, used_nbytes
from _harness import (
    KIB,
    MIB,
    Aim,
    Report,
    Section,
    argument_parser,
    console,
    interleave,
    machine_facts,
    page_hashes_of,
    size_text,
    sizes,
)
from _our_stores import in_directory, pages_in_directory
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
from _store import Memory

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from _harness import Candidate
    from _store import Store

    StoreFactory: TypeAlias = Callable[[Path, Memory, Memory], Store]

BATCH_PAGES = 128
ROUNDS = {64 * KIB: 15, 1 * MIB: 7, 4 * MIB: 3}
# With more data the kernel would throttle writers until it has written back dirty pages.
CAPACITY_PAGES = {64 * KIB: 4096, 1 * MIB: 512, 4 * MIB: 160}
# Space for the frame and the trailer that a store adds to a page.
OVERHEAD_NBYTES = 256

OURS = ("ours: FileStorage", "ours: page store, none", "ours: page store, xxh3")
SGLANG = "HiCacheFile"
GET_LIMIT = "preadv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The shared data of all sections of one page size."""

    report: Report
    root: Path
    rounds: int
    source: Memory
    destination: Memory

    @property
    def page_nbytes(self) -> int:
        return self.source.page_nbytes

    @property
    def capacity_pages(self) -> int:
        return CAPACITY_PAGES.get(self.page_nbytes, 4 * BATCH_PAGES)

    @property
    def capacity_nbytes(self) -> int:
        return self.capacity_pages * (self.page_nbytes + OVERHEAD_NBYTES)

    def directory(self) -> Path:
        """Return a new empty directory."""
        return Path(tempfile.mkdtemp(dir=self.root))

    def open(self, factory: StoreFactory, directory: Path) -> Store:
        return factory(directory, self.source, self.destination)

    def measure(
        self, title: str, candidates: Sequence[Candidate], baselines: Sequence[str]
    ) -> Section:
        seconds = interleave(candidates, self.rounds)
        return self.report.add(
            Section(
                title=f"{title}, {BATCH_PAGES} pages of {size_text(self.page_nbytes)}",
                unit="GB/s",
                work=BATCH_PAGES * self.page_nbytes / 1e9,
                seconds=seconds,
                baselines=[name for name in baselines if name in seconds],
            )
        )


class Get:
    """Reads one batch repeatedly."""

    def __init__(self, factory: StoreFactory, bench: Bench) -> None:
        self._directory = bench.directory()
        self.store = bench.open(factory, self._directory)
        self.name = self.store.name
        self._source = bench.source
        self._hashes = page_hashes_of(self.name, 0, BATCH_PAGES)
        self.store.prepare_set(self._hashes)
        self.store.set()

    def prepare(self, turn: int) -> None:  # noqa: ARG002 - every turn is the same
        self.store.prepare_get(self._hashes)

    def run(self) -> None:
        self.store.get()

    def check(self) -> None:
        compare(self.store, self._source)

    def close(self) -> None:
        self.store.close()
        empty_files(self._directory)


class SetInEmpty:
    """Writes each batch into a new store in an empty directory."""

    def __init__(self, factory: StoreFactory, bench: Bench) -> None:
        self._factory = factory
        self._bench = bench
        self._open()
        self.name = self.store.name
        self._hashes = page_hashes_of(self.name, 0, BATCH_PAGES)
        self._retire()

    def prepare(self, turn: int) -> None:
        self._hashes = page_hashes_of(self.name, turn, BATCH_PAGES)
        self._bench.source.stamp(turn)
        self._open()
        self.store.prepare_set(self._hashes)

    def run(self) -> None:
        self.store.set()

    def check(self) -> None:
        read_back(self.store, self._hashes, self._bench.source)
        self._retire()

    def _open(self) -> None:
        self._directory = self._bench.directory()
        self.store = self._bench.open(self._factory, self._directory)

    def _retire(self) -> None:
        self.store.close()
        empty_files(self._directory)


class SetMore:
    """Writes each batch into the same store, below its capacity or at it."""

    def __init__(self, factory: StoreFactory, bench: Bench, *, full: bool) -> None:
        self._bench = bench
        self._full = full
        self._directory = bench.directory()
        self.store = bench.open(factory, self._directory)
        self.name = self.store.name
        self._hashes: list[str] = []
        for batch in self._filling():
            self.store.prepare_set(batch)
            self.store.set()
            self._make_room()

    def prepare(self, turn: int) -> None:
        self._hashes = page_hashes_of(self.name, turn, BATCH_PAGES)
        self._bench.source.stamp(turn)
        self.store.prepare_set(self._hashes)

    def run(self) -> None:
        self.store.set()

    def check(self) -> None:
        read_back(self.store, self._hashes, self._bench.source)
        self._make_room()

    def close(self) -> None:
        self.store.close()
        empty_files(self._directory)

    def _filling(self) -> list[list[str]]:
        """Return batches that fill the store, or create each fan-out directory that a store may have."""
        if self._full:
            batches = self._bench.capacity_pages // BATCH_PAGES + 1
            return [
                page_hashes_of(self.name, -number, BATCH_PAGES) for number in range(1, batches + 1)
            ]
        heads = [f"{byte:02x}" for byte in range(256)]
        tails = page_hashes_of(self.name, -1, BATCH_PAGES) + page_hashes_of(
            self.name, -2, BATCH_PAGES
        )
        hashes = [head + tail[2:] for head, tail in zip(heads, tails, strict=True)]
        return [hashes[:BATCH_PAGES], hashes[BATCH_PAGES:]]

    def _make_room(self) -> None:
        if not self._full:
            empty_files(self._directory)
        elif (held := used_nbytes(self._directory)) > self._bench.capacity_nbytes + KIB:
            raise RuntimeError(f"{self.name} holds {held} bytes: more than its capacity")


def bench_get(bench: Bench) -> None:
    """Measure reads of pages in the kernel's cache into mapped memory."""
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
            aim(bench, section, name, GET_LIMIT, least)
    for name in OURS:
        aim(bench, section, name, SGLANG, 1.0)


def bench_set_in_empty(bench: Bench) -> None:
    """Measure the first batch of a new store, with the creation of its directories."""
    factories: list[StoreFactory] = [PlainFiles, *sglang_stores()[:1], *ours()]
    candidates = [SetInEmpty(factory, bench) for factory in factories]
    section = bench.measure("set, empty store", candidates, (PlainFiles.name, SGLANG))
    for name in OURS:
        aim(bench, section, name, SGLANG, 1.0)


def bench_set_below_capacity(bench: Bench) -> None:
    """Measure a batch of new pages in a used store with free space."""
    factories: list[StoreFactory] = [Memcpy, PlainFiles, *sglang_stores(), *ours()]
    section = bench_set_more(bench, factories, "set, room to spare", PlainFiles.name, full=False)
    for name in OURS:
        aim(bench, section, name, PlainFiles.name, 0.8)
        aim(bench, section, name, SGLANG, 1.0)


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
        aim(bench, section, name, SGLANG, 5.0)


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
    """Return SGLang's file backend without, then with the copies that its controller makes."""
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
        partial(pages_in_directory, "file", checksum="none", **settings),
        partial(pages_in_directory, "file", checksum="xxh3", **settings),
    ]


def aim(bench: Bench, section: Section, name: str, baseline: str, least: float) -> None:
    """Note whether `name` is at least `least` times as fast as `baseline`, if both ran."""
    if baseline in section.seconds:
        text = f"{section.title}: {name} / {baseline}"
        bench.report.aims.append(Aim(text, least, section.ratio(name, baseline)))


def read_back(store: Store, hashes: Sequence[str], source: Memory) -> None:
    store.prepare_get(hashes)
    store.get()
    compare(store, source)


def compare(store: Store, source: Memory) -> None:
    if not np.array_equal(store.received(), source.rows):
        raise RuntimeError(f"{store.name} did not bring back what was set")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--sizes",
        type=sizes,
        default=list(ROUNDS),
        metavar="KIB,KIB",
        help="page sizes in KiB, multiples of 32 (default: 64,1024,4096)",
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds, and no pages of 4 MiB")
    parser.add_argument("--power", action="store_true", help="also measure synced writes")
    parser.add_argument(
        "--path", type=Path, help="where to put the files (default: a new directory)"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.sizes = [size for size in options.sizes if size < 4 * MIB]
        options.rounds = options.rounds or 3
    if any(size <= 0 or size % (32 * KIB) for size in options.sizes):
        parser.error("--sizes: a page has a multiple of 32 KiB")
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds: at least 1")
    if options.path is not None and not options.path.is_dir():
        parser.error(f"--path: {options.path} is no directory")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    root = Path(tempfile.mkdtemp(prefix="hicache-bench-", dir=options.path))
    try:
        libraries = ["torch", "numpy", *(["sglang"] if _sglang.is_installed() else [])]
        report = Report(machine_facts(root, distributions=libraries))
        report.print_facts()
        spread_directories(root)
        if not _sglang.is_installed():
            console.print(f"SGLang {_sglang.WHEEL_VERSION} is not here: `make bench-file` has it")
        for page_nbytes in options.sizes:
            run(report, root, page_nbytes, options)
    finally:
        shutil.rmtree(root)
    report.finish(options.json)
    return 0


def run(report: Report, root: Path, page_nbytes: int, options: argparse.Namespace) -> None:
    """Measure all sections of one page size."""
    bench = Bench(
        report=report,
        root=root,
        rounds=options.rounds or ROUNDS.get(page_nbytes, 5),
        source=Memory(BATCH_PAGES, page_nbytes),
        destination=Memory(BATCH_PAGES, page_nbytes),
    )
    bench.source.fill(page_nbytes)
    bench_get(bench)
    bench_set_in_empty(bench)
    bench_set_below_capacity(bench)
    bench_set_at_capacity(bench)
    if options.power:
        bench_set_synced(bench)


if __name__ == "__main__":
    sys.exit(main())
