"""Compare the `redis` backend with the socket, a bare loop, redis-py and LMCache's C++ client.

python benchmarks/redis_backend.py [--quick] [--server valkey-server] [--json FILE]

`make bench-redis` makes an environment that has LMCache's client; elsewhere its row is left out. The
file is not named `redis.py`, because Python would import that instead of redis-py.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import redis
from _harness import KIB, MIB, Parser, Report, size_text
from _loopback import Loopback
from _our_stores import TIMEOUT_S, OurPageStore, OurStorage
from _redis_stores import LmcacheClient, RawSocket, RedisPy
from _servers import REDIS, null_server, redis_server
from _store import DIRECTIONS, BatchRun, Memory, memories, print_cpu
from hicache_backends.redis import RedisStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from _store import Direction, Store

PAGES = {64 * KIB: 1024, 1 * MIB: 128, 4 * MIB: 64}
ROUNDS = {64 * KIB: 9, 1 * MIB: 9, 4 * MIB: 5}
LIMIT = "loopback, 1 socket"
OURS = "ours: RedisStorage"
MIN_OF_RAW = 0.8
MIN_OF_REDIS_PY = 2.0


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
    report: Report, direction: Direction, rounds: int, port: int, all_stores: Sequence[Store]
) -> None:
    """Add a table of rates and a table of processor time, and record the aims."""
    client: Any = redis.Redis(port=port)
    with client:
        turns = [BatchRun(store, direction, empty=client.flushall) for store in all_stores]
        source = all_stores[0].source
        section = report.measure(
            f"{direction}, {source.pages} pages of {size_text(source.page_nbytes)}",
            turns,
            rounds,
            work=source.gb,
            baselines=[LIMIT, RawSocket.name, RedisPy.name],
        )
    print_cpu(turns, source.gb)
    for name in (OURS, "ours: page store, none"):
        report.aim(section, name, RawSocket.name, MIN_OF_RAW)
        report.aim(section, name, RedisPy.name, MIN_OF_REDIS_PY)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__, page_sizes=PAGES, quick_rounds=3)
    parser.add_argument(
        "--server", choices=REDIS, default="redis-server", help="(default: %(default)s)"
    )
    options = parser.parsed(arguments)
    libraries = ["redis", "hiredis", *(["lmcache"] if LmcacheClient.is_installed() else [])]
    report = Report.begin(distributions=libraries)
    for page_nbytes in options.sizes:
        source, destination = memories(PAGES.get(page_nbytes, 64), page_nbytes)
        with null_server() as sink_port, redis_server(options.server) as port:
            all_stores = stores(port, sink_port, source, destination)
            for direction in DIRECTIONS:
                rounds = options.rounds or ROUNDS.get(page_nbytes, 5)
                measure(report, direction, rounds, port, all_stores)
            for store in all_stores:
                store.close()
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
