"""The `mooncake` backend against Mooncake's own client, SGLang's `MooncakeStore` and memcpy.

python benchmarks/mooncake_backend.py [--quick] [--rounds N] [--json FILE]

`make bench-mooncake` makes an environment that has SGLang's backend; elsewhere its row is left out.
The name is not `mooncake.py`, because Python would import that file instead of the client.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
)
from _mooncake_cluster import master, node
from _mooncake_stores import (
    Cluster,
    ExistsFirstClient,
    RawClient,
    SGLangMooncakeStore,
)
from _our_stores import OurPageStore, OurStorage
from _plain_files import Memcpy
from _store import Memory

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


class BatchRun:
    """Moves one batch in one direction, in a cluster that holds nothing else."""

    def __init__(self, store: Store, cluster: Cluster, direction: str) -> None:
        self.store = store
        self.name = store.name
        self._cluster = cluster
        self.direction = direction
        self._hashes: list[str] = []

    def prepare(self, turn: int) -> None:
        self._cluster.empty()
        self._hashes = page_hashes_of(self.name, turn, self.store.source.pages)
        self.store.source.stamp(turn)
        self.store.prepare_set(self._hashes)
        if self.direction == "get":
            self.store.set()
            self.store.prepare_get(self._hashes)

    def run(self) -> None:
        (self.store.get if self.direction == "get" else self.store.set)()

    def check(self) -> None:
        """Compare the moved pages with the source."""
        if self.direction == "set":
            self.store.prepare_get(self._hashes)
            self.store.get()
        if not np.array_equal(self.store.received(), self.store.source.rows):
            raise RuntimeError(f"{self.name} did not bring back what was set")


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
    """Add one table, and note the aims."""
    seconds = interleave(turns, rounds)
    source, direction = turns[0].store.source, turns[0].direction
    names = [turn.name for turn in turns]
    section = report.add(
        Section(
            title=f"{direction}, {source.pages} pages of {size_text(source.page_nbytes)}, {where}",
            unit="GB/s",
            work=source.pages * source.page_nbytes / 1e9,
            seconds=seconds,
            baselines=[
                name
                for name in (Memcpy.name, RawClient.name, SGLangMooncakeStore.name)
                if name in names
            ],
        )
    )
    baselines = [ExistsFirstClient.name if direction == "set" else RawClient.name]
    baselines += [SGLangMooncakeStore.name] if SGLangMooncakeStore.name in names else []
    for baseline in baselines:
        text = f"{section.title}: {OURS} / {baseline}"
        least = MIN_OF_RAW if baseline != SGLangMooncakeStore.name else 1.0
        report.aims.append(Aim(text, least, section.ratio(OURS, baseline)))


def bench(report: Report, options: argparse.Namespace, *, own_segment: bool) -> None:
    """Measure all sizes in a cluster whose memory is this process's, or another process's."""
    where = "own segment" if own_segment else "another process, TCP"
    with ExitStack() as stack:
        config: dict[str, Any] = stack.enter_context(master())
        if own_segment:
            config["global_segment_size"] = SEGMENT_NBYTES
        else:
            stack.enter_context(node(config, SEGMENT_NBYTES))
        cluster = Cluster(config)
        stack.callback(cluster.storage.close)
        cluster.touch(TOUCHED_NBYTES)
        for page_nbytes, pages in PAGES.items():
            if options.quick and page_nbytes > MIB:
                continue
            rounds = options.rounds or (5 if options.quick else ROUNDS[page_nbytes])
            source, destination = Memory(pages, page_nbytes), Memory(pages, page_nbytes)
            source.fill(page_nbytes)
            for memory in (source, destination):
                cluster.storage.register_buffer(memory.whole)
            chosen = stores(cluster, source, destination)
            for direction in ("set", "get"):
                measure(
                    report, where, rounds, [BatchRun(one, cluster, direction) for one in chosen]
                )
            for store in chosen:
                store.close()
            for memory in (source, destination):
                cluster.storage.unregister_buffer(memory.whole)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="5 rounds, and no pages of 4 MiB")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    libraries = ["numpy", *(["torch", "sglang"] if _sglang.is_installed() else [])]
    facts = machine_facts(distributions=libraries)
    facts["load"] = ", ".join(f"{load:.2f}" for load in os.getloadavg())
    report = Report(facts)
    report.print_facts()
    if not _sglang.is_installed():
        console.print(f"SGLang {_sglang.WHEEL_VERSION} is not here: `make bench-mooncake` has it")
    for own_segment in (True, False):
        bench(report, options, own_segment=own_segment)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
