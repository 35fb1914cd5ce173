"""Compare the `mooncake` backend with Mooncake's own client, SGLang's `MooncakeStore` and memcpy.

python benchmarks/mooncake_backend.py [--quick] [--rounds N] [--json FILE]

`make bench-mooncake` makes an environment that has SGLang's backend; elsewhere its row is left out. The
file is not named `mooncake.py`, because Python would import that instead of the client.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import _sglang
from _harness import KIB, MIB, Parser, Report, scratch, size_text
from _mooncake_stores import Cluster, ExistsFirstClient, RawClient, SGLangMooncakeStore
from _our_stores import TIMEOUT_S, OurPageStore, OurStorage
from _plain_files import Memcpy
from _servers import mooncake_master, servers
from _store import DIRECTIONS, BatchRun, Memory, memories

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from _store import Store

PAGES = {64 * KIB: 128, 1 * MIB: 128, 4 * MIB: 64}
ROUNDS = {64 * KIB: 25, 1 * MIB: 15, 4 * MIB: 9}
SEGMENT_NBYTES = 1 << 30
TOUCHED_NBYTES = SEGMENT_NBYTES * 3 // 4
OURS = "ours: MooncakeStorage"
MIN_OF_RAW = 0.95


def stores(cluster: Cluster, source: Memory, destination: Memory) -> list[Store]:
    made: list[Callable[[], Store]] = [
        partial(Memcpy, Path(), source, destination),
        *(partial(kind, cluster, source, destination) for kind in (RawClient, ExistsFirstClient)),
        lambda: OurStorage(cluster.opened(), source, destination),
        lambda: OurPageStore(cluster.opened(), source, destination, checksum="none"),
        lambda: OurPageStore(cluster.opened(), source, destination, checksum="xxh3"),
    ]
    if _sglang.is_installed():
        made.append(partial(SGLangMooncakeStore, cluster, source, destination))
    return [make() for make in made]


def measure(report: Report, where: str, rounds: int, turns: Sequence[BatchRun]) -> None:
    """Add one table, and record the aims."""
    source, direction = turns[0].store.source, turns[0].direction
    section = report.measure(
        f"{direction}, {source.pages} pages of {size_text(source.page_nbytes)}, {where}",
        turns,
        rounds,
        work=source.gb,
        baselines=[Memcpy.name, RawClient.name, SGLangMooncakeStore.name],
    )
    raw = ExistsFirstClient.name if direction == "set" else RawClient.name
    report.aim(section, OURS, raw, MIN_OF_RAW)
    report.aim(section, OURS, SGLangMooncakeStore.name, 1.0)


def bench(report: Report, options: argparse.Namespace, *, own_segment: bool) -> None:
    """Measure all sizes in a cluster whose memory belongs to this process, or to another one."""
    where = "own segment" if own_segment else "another process, TCP"
    with ExitStack() as stack:
        directory = stack.enter_context(scratch(None))
        master = stack.enter_context(mooncake_master(directory))
        if not own_segment:
            stack.enter_context(servers.MooncakeNode(master, str(SEGMENT_NBYTES)))
        lent_nbytes = SEGMENT_NBYTES if own_segment else 0
        cluster = Cluster(master.config(global_segment_size=lent_nbytes, timeout_s=TIMEOUT_S))
        stack.callback(cluster.storage.close)
        cluster.touch(TOUCHED_NBYTES)
        for page_nbytes in options.sizes:
            source, destination = memories(PAGES.get(page_nbytes, 64), page_nbytes)
            for memory in (source, destination):
                cluster.storage.register_buffer(memory.whole)
            chosen = stores(cluster, source, destination)
            for direction in DIRECTIONS:
                rounds = options.rounds or ROUNDS.get(page_nbytes, 9)
                turns = [BatchRun(store, direction, empty=cluster.empty) for store in chosen]
                measure(report, where, rounds, turns)
            for store in chosen:
                store.close()
            for memory in (source, destination):
                cluster.storage.unregister_buffer(memory.whole)


def main(arguments: Sequence[str] | None = None) -> int:
    options = Parser(__doc__, page_sizes=PAGES, quick_rounds=5).parsed(arguments)
    load = ", ".join(f"{load:.2f}" for load in os.getloadavg())
    report = Report.begin(
        distributions=["numpy", *_sglang.libraries("torch")], facts={"load": load}
    )
    _sglang.tell("bench-mooncake")
    for own_segment in (True, False):
        bench(report, options, own_segment=own_segment)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
