"""The `redis` backend against the socket, a bare loop, redis-py and LMCache's C++ client.

python benchmarks/redis_backend.py [--quick] [--server valkey-server] [--json FILE]

`make bench-redis` makes an environment that has LMCache's client; elsewhere its row is left out.
The name is not `redis.py`, because Python would import that file instead of redis-py.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import redis
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
from _our_stores import TIMEOUT_S, OurPageStore, OurStorage
from _redis_server import redis_server, sink
from _redis_stores import (
    LmcacheClient,
    Loopback,
    RawSocket,
    RedisPy,
)
from _store import Memory
from hicache_backends.redis import RedisStorage
from rich.table import Table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from _store import Store

PAGES = {64 * KIB: 1024, 1 * MIB: 128, 4 * MIB: 64}
ROUNDS = {64 * KIB: 9, 1 * MIB: 9, 4 * MIB: 5}
OURS = "ours: RedisStorage"
MIN_OF_RAW = 0.8
MIN_OF_REDIS_PY = 2.0


class BatchRun:
    """Moves one batch in one direction, and records the processor time of this process."""

    def __init__(self, store: Store, port: int, direction: str) -> None:
        self.store = store
        self.name = store.name
        self.cpu_s: list[float] = []
        self._client: Any = redis.Redis(port=port)
        self._direction = direction
        self._hashes: list[str] = []

    def prepare(self, turn: int) -> None:
        """Empty the server synchronously; for a get, store the batch."""
        self._hashes = page_hashes_of(self.name, turn, self.store.source.pages)
        self._client.flushall()
        self.store.source.stamp(turn)
        self.store.prepare_set(self._hashes)
        if self._direction == "get":
            self.store.set()
            self.store.prepare_get(self._hashes)

    def run(self) -> None:
        began_s = time.process_time()
        (self.store.get if self._direction == "get" else self.store.set)()
        self.cpu_s.append(time.process_time() - began_s)

    def check(self) -> None:
        """Compare the moved pages with the source."""
        if isinstance(self.store, Loopback):
            return  # the peer discards the bytes
        if self._direction == "set":
            self.store.prepare_get(self._hashes)
            self.store.get()
        if not np.array_equal(self.store.received(), self.store.source.rows):
            raise RuntimeError(f"{self.name} did not bring back what was set")

    def close(self) -> None:
        self._client.close()


def stores(port: int, sink_port: int, source: Memory, destination: Memory) -> list[Store]:
    def ours() -> RedisStorage:
        return RedisStorage.from_config(
            {"url": f"redis://127.0.0.1:{port}", "timeout_s": TIMEOUT_S}
        )

    made: list[Callable[[], Store]] = [
        partial(Loopback, sink_port, source, destination),
        partial(RawSocket, port, source, destination),
        partial(RedisPy, port, source, destination),
        partial(OurStorage, ours(), source, destination),
        partial(OurPageStore, ours(), source, destination, checksum="none"),
        partial(OurPageStore, ours(), source, destination, checksum="xxh3"),
    ]
    if LmcacheClient.is_installed():
        made.append(partial(LmcacheClient, port, source, destination))
    return [make() for make in made]


def measure(
    report: Report, direction: str, rounds: int, port: int, all_stores: list[Store]
) -> None:
    """Add one table and one of processor time, and note the aims."""
    turns = [BatchRun(store, port, direction) for store in all_stores]
    seconds = interleave(turns, rounds)
    source = all_stores[0].source
    work = source.pages * source.page_nbytes / 1e9
    section = Section(
        title=f"{direction}, {source.pages} pages of {size_text(source.page_nbytes)}",
        unit="GB/s",
        work=work,
        seconds=seconds,
        baselines=[Loopback.name, RawSocket.name, RedisPy.name],
    )
    report.add(section)
    print_cpu(turns, work)
    for turn in turns:
        turn.close()
    for name in (OURS, "ours: page store, none"):
        for baseline, least in ((RawSocket.name, MIN_OF_RAW), (RedisPy.name, MIN_OF_REDIS_PY)):
            text = f"{section.title}: {name} / {baseline}"
            report.aims.append(Aim(text, least, section.ratio(name, baseline)))


def print_cpu(turns: Sequence[BatchRun], work: float) -> None:
    """Print the processor time of each client, which is the same on a real network."""
    shown = Table(title="processor time of the client", title_justify="left")
    shown.add_column("candidate")
    shown.add_column("s/GB", justify="right")
    for turn in turns:
        shown.add_row(turn.name, f"{statistics.median(turn.cpu_s[1:]) / work:.2f}")
    console.print(shown)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--server", default="redis-server", help="the program (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds, and no pages of 4 MiB")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    libraries = ["redis", "hiredis", *(["lmcache"] if LmcacheClient.is_installed() else [])]
    report = Report(machine_facts(distributions=libraries))
    report.print_facts()
    for page_nbytes, pages in PAGES.items():
        if options.quick and page_nbytes > MIB:
            continue
        rounds = options.rounds or (3 if options.quick else ROUNDS[page_nbytes])
        source, destination = Memory(pages, page_nbytes), Memory(pages, page_nbytes)
        source.fill(page_nbytes)
        with sink() as sink_port, redis_server(options.server) as port:
            all_stores = stores(port, sink_port, source, destination)
            for direction in ("set", "get"):
                measure(report, direction, rounds, port, all_stores)
            for store in all_stores:
                store.close()
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
