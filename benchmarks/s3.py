"""The `s3` backend against bare sockets, boto3, obstore and SGLang's S3 backend, in one process.

python benchmarks/s3.py [--quick] [--sizes KIB,KIB] [--servers null,ministack] [--json FILE]

`make bench-s3` makes an environment that has them all; elsewhere the missing rows are left out. The
null server only moves bytes, so its tables show the cost of the clients.
"""

from __future__ import annotations

import importlib.util
import resource
import statistics
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import _sglang
import numpy as np
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
from _s3_servers import BUCKET, ministack, null_server, remove
from _s3_stores import Boto3, Loopback, Obstore, OurPagesOnS3, Ours, SeaweedFS
from _store import Memory
from rich.table import Table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from _s3_stores import S3Store

    StoreFactory: TypeAlias = Callable[[int, Memory, Memory], S3Store]

PAGES = {64 * KIB: 128, 1 * MIB: 128, 4 * MIB: 32}
ROUNDS = {64 * KIB: 9, 1 * MIB: 5, 4 * MIB: 5}
SERVERS = {"null": null_server, "ministack": ministack}

BOTO3 = "boto3, 16 threads"
SGLANG = SeaweedFS.name
LIMIT = "loopback, 4 sockets"
OURS = ("ours: S3Storage", "ours: page store, 2 threads", "ours: page store, 8 threads")


@dataclass
class BatchRun:
    """Moves one batch repeatedly, and records the processor time of this process."""

    store: S3Store
    sets: bool
    cpu_s: list[float] = field(default_factory=list[float])

    @property
    def name(self) -> str:
        return self.store.name

    def prepare(self, turn: int) -> None:
        hashes = page_hashes_of(self.name, turn if self.sets else 0, self.store.source.pages)
        if self.sets:
            self.store.source.stamp(turn)
            self.store.prepare_set(hashes)
        else:
            self.store.prepare_get(hashes)

    def run(self) -> None:
        before_s = used_s()
        if self.sets:
            self.store.set()
        else:
            self.store.get()
        self.cpu_s.append(used_s() - before_s)

    def check(self) -> None:
        if self.sets:
            self.store.prepare_get(self.store.hashes)
            self.store.get()
        if not np.array_equal(self.store.received(), self.store.source.rows):
            raise RuntimeError(f"{self.name} did not bring back what was set")
        if self.sets:
            clear(self.store)


def factories(server: str) -> list[StoreFactory]:
    """Return the candidates for a server."""
    found: list[StoreFactory] = []
    if server == "null":
        found += [partial(Loopback, connections=1), partial(Loopback, connections=4)]
    found += [partial(Boto3, threads=16), partial(Boto3, threads=4, tuned=True)]
    if importlib.util.find_spec("obstore"):
        found += [partial(Obstore, threads=4)]
    if _sglang.is_installed():
        found += [SeaweedFS]
    return [
        *found,
        Ours,
        partial(OurPagesOnS3, threads=2),
        partial(OurPagesOnS3, threads=8),
    ]


def bench(report: Report, server: str, port: int, page_nbytes: int, rounds: int) -> None:
    """Measure gets and sets of one page size on one server."""
    pages = PAGES.get(page_nbytes, 32)
    source, destination = Memory(pages, page_nbytes), Memory(pages, page_nbytes)
    source.fill(page_nbytes)
    stores = [factory(port, source, destination) for factory in factories(server)]
    title = f"{pages} pages of {size_text(page_nbytes)}, {server}"
    for store in stores:
        store.prepare_set(page_hashes_of(store.name, 0, store.source.pages))
        store.set()
    measure(report, f"get, {title}", stores, rounds, sets=False)
    for store in stores:
        clear(store)
    measure(report, f"set, {title}", stores, rounds, sets=True)
    for store in stores:
        store.close()


def measure(
    report: Report, title: str, stores: Sequence[S3Store], rounds: int, *, sets: bool
) -> None:
    turns = [BatchRun(store, sets) for store in stores]
    seconds = interleave(turns, rounds)
    work = stores[0].source.pages * stores[0].source.page_nbytes / 1e9
    baselines = [name for name in (LIMIT, BOTO3, SGLANG) if name in seconds]
    section = report.add(
        Section(title=title, unit="GB/s", work=work, seconds=seconds, baselines=baselines)
    )
    console.print(cpu_table(turns, work))
    for name in OURS:
        for baseline, least in ((BOTO3, 2.0), (SGLANG, 1.0)):
            if baseline in seconds:
                text = f"{title}: {name} / {baseline}"
                report.aims.append(Aim(text, least, section.ratio(name, baseline)))


def cpu_table(turns: Sequence[BatchRun], work: float) -> Table:
    """Return a table of the client's processor time, which is the same on other networks."""
    shown = Table("client CPU", title_justify="left")
    shown.add_column("s/GB", justify="right")
    for one in turns:
        shown.add_row(one.name, f"{statistics.median(one.cpu_s[1:]) / work:.2f}")
    return shown


def clear(store: S3Store) -> None:
    """Delete the objects of the batch that was prepared last."""
    remove(store.port, [f"/{BUCKET}/{name}" for name in store.object_names()])


def used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--sizes",
        type=sizes,
        default=list(PAGES),
        metavar="KIB,KIB",
        help="page sizes in KiB (default: 64,1024,4096)",
    )
    parser.add_argument(
        "--servers",
        type=lambda text: text.split(","),
        default=list(SERVERS),
        metavar="NAME,NAME",
        help="null, ministack (default: both)",
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds, and no pages of 4 MiB")
    options = parser.parse_args(arguments)
    if options.quick:
        options.sizes = [size for size in options.sizes if size < 4 * MIB]
        options.rounds = options.rounds or 3
    if set(options.servers) - set(SERVERS):
        parser.error(f"--servers: choose of {', '.join(SERVERS)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    present = ["boto3", *(name for name in ("obstore", "ministack", "sglang") if is_here(name))]
    report = Report(machine_facts(distributions=present))
    report.print_facts()
    for server in options.servers:
        for page_nbytes in options.sizes:
            with SERVERS[server]() as port:
                rounds = options.rounds or ROUNDS.get(page_nbytes, 5)
                bench(report, server, port, page_nbytes, rounds)
    report.finish(options.json)
    return 0


def is_here(name: str) -> bool:
    return _sglang.is_installed() if name == "sglang" else bool(importlib.util.find_spec(name))


if __name__ == "__main__":
    sys.exit(main())
