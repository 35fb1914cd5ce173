"""Compare the `s3` backend with bare sockets, boto3, obstore and SGLang's S3 backend, in one process.

python benchmarks/s3.py [--quick] [--sizes KIB,KIB] [--servers null,ministack] [--json FILE]

`make bench-s3` makes an environment that has all of them; elsewhere the missing rows are left out. The
null server only moves bytes, so its tables show the cost of the clients.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from typing import TYPE_CHECKING

import _sglang
from _harness import KIB, MIB, Parser, Report, names, size_text
from _loopback import Loopback
from _s3_stores import Boto3, Obstore, OurPagesOnS3, Ours, SeaweedFS, request
from _servers import ministack, null_server
from _store import DIRECTIONS, BatchRun, Memory, memories, print_cpu

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from _store import Direction, Store

    StoreFactory: TypeAlias = Callable[[int, Memory, Memory], Store]

PAGES = {64 * KIB: 128, 1 * MIB: 128, 4 * MIB: 32}
ROUNDS = {64 * KIB: 9, 1 * MIB: 5, 4 * MIB: 5}
SERVERS = {"null": null_server, "ministack": ministack}

BOTO3 = "boto3, 16 threads"
SGLANG = SeaweedFS.name
LIMIT = "loopback, 4 sockets"
OURS = ("ours: S3Storage", "ours: page store, 2 threads", "ours: page store, 8 threads")


def factories(server: str) -> list[StoreFactory]:
    """Return the candidates for a server."""
    found: list[StoreFactory] = []
    if server == "null":
        found += [Loopback, partial(Loopback, sockets=4)]
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


def measure(
    report: Report, where: str, stores: Sequence[Store], direction: Direction, rounds: int
) -> None:
    """Add a table of rates and a table of processor time, and record the aims."""
    turns = [
        BatchRun(store, direction, empty=store.clear, repeats=direction == "get")
        for store in stores
    ]
    source = stores[0].source
    section = report.measure(
        f"{direction}, {source.pages} pages of {size_text(source.page_nbytes)}, {where}",
        turns,
        rounds,
        work=source.gb,
        baselines=(LIMIT, BOTO3, SGLANG),
    )
    print_cpu(turns, source.gb)
    for store in stores:
        store.clear()
    for name in OURS:
        report.aim(section, name, BOTO3, 2.0)
        report.aim(section, name, SGLANG, 1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__, page_sizes=PAGES, quick_rounds=3)
    parser.add_argument(
        "--servers",
        type=names,
        default=list(SERVERS),
        metavar="NAME,NAME",
        help="null, ministack (default: both)",
    )
    options = parser.parsed(arguments)
    if set(options.servers) - set(SERVERS):
        parser.error(f"--servers: choose of {', '.join(SERVERS)}")
    present = filter(importlib.util.find_spec, ("obstore", "ministack"))
    report = Report.begin(distributions=["boto3", *present, *_sglang.libraries()])
    for server in options.servers:
        for page_nbytes in options.sizes:
            source, destination = memories(PAGES.get(page_nbytes, 32), page_nbytes)
            with SERVERS[server]() as port:
                request(port, "PUT")
                stores = [factory(port, source, destination) for factory in factories(server)]
                for direction in DIRECTIONS:
                    rounds = options.rounds or ROUNDS.get(page_nbytes, 5)
                    measure(report, server, stores, direction, rounds)
                for store in stores:
                    store.close()
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
