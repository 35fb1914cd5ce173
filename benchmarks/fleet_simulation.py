"""Simulate a fleet of engines over one store: hits by tier, duplicate writes, and load by server.

    .venv/bin/python benchmarks/fleet_simulation.py --trace FILE.jsonl.gz
    .venv/bin/python benchmarks/fleet_simulation.py --conversations 4000 --speed 8

Without `--trace` the requests are a synthetic trace. No page is moved. An engine's rates are
assumptions, which you can change with flags. They decide how long a block takes to reach L3, and
therefore how often two engines compute it at the same time.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _fleet_model import BUCKETS, FleetSettings, Router, max_over_mean, simulate
from _harness import markdown_head, markdown_row
from hicache_backends.redis.layout import BUCKETS as BUCKET_NAMES
from hicache_backends.redis.layout import SpaceKeys
from redis.crc import key_slot

from hicache_storage.cli.sizes import size, size_from_zero
from hicache_storage.cli.traces import (
    add_shape_arguments,
    add_trace_arguments,
    pools_of,
    positive_number,
    read_requests,
)
from hicache_storage.config import positive_int
from hicache_storage.keys import KeySpace, Shard
from hicache_storage.planning.settings import PlanSettings
from hicache_storage.replay.trace import BLOCK_TOKENS, InfiniteCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _fleet_model import FleetFigures

    from hicache_storage.replay.trace import Request

_SLOTS = 16384
_MOST_REQUESTS = 10_000_000
_SERVERS = (4, 8, 16, 32, 64)
_HIT_TITLES = ("", "hits", "in L1 and L2", "in L3", "read", "written", "wait of a request")
_WRITE_TITLES = ("", "hits", "offered", "kept out", "found", "written", "duplicates", "again")
_TB = 1e12


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    add_trace_arguments(parser, most_requests=_MOST_REQUESTS)
    add = add_shape_arguments(parser, scale="1", scale_help="make pages smaller").add_argument
    add("--page-size", type=positive_int, default=64, help="tokens in a page (default: 64)")
    add("--host-size", type=size, default="32GiB", help="of each engine (default: 32GiB)")
    add("--storage-size", type=size_from_zero, default="4TiB", help="of L3 (default: 4TiB)")
    add = parser.add_argument_group("fleet").add_argument
    add("--engines", type=positive_int, default=64, help="(default: %(default)s)")
    add("--ranks", type=positive_int, default=1, help="of each engine (default: %(default)s)")
    add("--speed", type=positive_number, default=1.0, help="of the trace (default: 1)")
    add("--prefill-rate", type=positive_number, default=10_000.0, help="tokens/s (default: 10,000)")
    add("--load-rate", type=size, default="5GB", help="bytes/s (default: 5GB)")
    add("--write-rate", type=size, default="2GB", help="bytes/s (default: 2GB)")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate the routers and the rules for writes, and print a table for each question."""
    chosen = parse(arguments)
    requests = read_requests(chosen)
    plan = _plan_settings(chosen)
    fleet = _fleet_settings(chosen, plan)
    block_nbytes = plan.pages_per_block * plan.stored_nbytes(plan.pools)
    runs: dict[str, FleetFigures] = {}

    def run(name: str, **changes: Any) -> str:
        runs[name] = simulate(requests, replace(fleet, **changes), chosen.speed)
        return name

    by_router = [
        run("round robin"),
        run("first block", router=Router.PREFIX),
        run("first 4 blocks", router=Router.PREFIX, prefix_blocks=4),
        run("least loaded", router=Router.LEAST_LOADED),
        run("round robin, no L3", storage_blocks=0),
        run("round robin, L3 of all", storage_blocks=1 << 40),
        run("one engine, L3 of all", engines=1, storage_blocks=1 << 40),
    ]
    by_rule = [
        "round robin",
        run("written without a look", look_first=False),
        run("second use", second_use=True),
        run("second use, first 4 blocks", second_use=True, router=Router.PREFIX, prefix_blocks=4),
        run("second use, one engine", second_use=True, engines=1),
        run("writes take no time", write_s=0.0),
        run("neither a look nor time", look_first=False, write_s=0.0),
    ]
    _print_facts(requests, chosen, fleet, block_nbytes)
    spaces = {
        "one key space": _spaces(plan, 1)[:1],
        f"{len(plan.pools)} pools of {chosen.ranks} ranks": _spaces(plan, chosen.ranks),
        f"{len(plan.pools)} pools of 8 ranks": _spaces(plan, 8),
    }
    rows = [_hit_row(name, runs[name], block_nbytes, len(requests)) for name in by_router]
    _print_table(_HIT_TITLES, rows)
    _print_table(_WRITE_TITLES, [_write_row(name, runs[name]) for name in by_rule])
    loads = {name: _loads(runs["round robin"], spaces[name]) for name in spaces}
    titles = ("read, written", *(f"{number} servers" for number in _SERVERS))
    _print_table(titles, [[name, *cells] for name, cells in loads.items()])
    if chosen.json is not None:
        report = {name: _plain(figures) for name, figures in runs.items()}
        chosen.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


# --- settings ------------------------------------------------------------------------------------


def _plan_settings(chosen: argparse.Namespace) -> PlanSettings:
    return PlanSettings(
        model="fleet",
        pools=pools_of(chosen),
        page_tokens=chosen.page_size,
        host_sizes=(chosen.host_size,),
    )


def _fleet_settings(chosen: argparse.Namespace, plan: PlanSettings) -> FleetSettings:
    block_nbytes = plan.pages_per_block * plan.stored_nbytes(plan.pools)
    return FleetSettings(
        engines=chosen.engines,
        host_blocks=plan.host_blocks(chosen.host_size),
        storage_blocks=plan.storage_blocks(chosen.storage_size),
        compute_s=BLOCK_TOKENS / chosen.prefill_rate,
        load_s=block_nbytes / chosen.load_rate,
        write_s=block_nbytes / chosen.write_rate,
        pages_per_block=plan.pages_per_block,
    )


def _spaces(plan: PlanSettings, ranks: int) -> list[tuple[KeySpace, float]]:
    """Return the key spaces of the pools for some ranks, each with the bytes of a page."""
    return [
        (
            KeySpace(
                model=plan.model,
                dtype=pool.shape.dtype,
                layout="page_first",
                page_tokens=plan.page_tokens,
                page_nbytes=max(1, plan.page_nbytes([pool]) // ranks),
                shard=Shard(layers=(0, pool.shape.layers), heads=(rank, rank + 1)),
                pool=pool.name,
            ),
            plan.stored_nbytes([pool]) / ranks,
        )
        for pool in plan.pools
        for rank in range(ranks)
    ]


def placement(
    spaces: Sequence[tuple[KeySpace, float]], servers: int
) -> list[tuple[float, list[int]]]:
    """Return, for each key space, the bytes of a page and the server of each bucket in a cluster.

    The cluster's slots are split into equal ranges, as `redis-cli --cluster create` does.
    """
    placed: list[tuple[float, list[int]]] = []
    for space, nbytes in spaces:
        keys = SpaceKeys("hicache:", space.id)
        slots = [key_slot(keys.index(bucket)) for bucket in BUCKET_NAMES]
        placed.append((nbytes, [slot * servers // _SLOTS for slot in slots]))
    return placed


def _plain(figures: FleetFigures) -> dict[str, Any]:
    """Return the figures in a form that JSON supports. Counts by bucket become lists."""
    plain = {field.name: getattr(figures, field.name) for field in fields(figures)}
    for name in ("reads", "writes"):
        plain[name] = [plain[name][bucket] for bucket in range(BUCKETS)]
    return plain


# --- tables --------------------------------------------------------------------------------------


def _print_facts(
    requests: Sequence[Request],
    chosen: argparse.Namespace,
    fleet: FleetSettings,
    block_nbytes: int,
) -> None:
    cache = InfiniteCache()
    hits = sum(cache.hits(request) for request in requests)
    blocks = sum(len(request.blocks) for request in requests)
    seconds = requests[-1].arrival_s / chosen.speed
    print(
        f"{len(requests):,} requests in {seconds:,.0f} s, {blocks:,} blocks of {block_nbytes:,} B"
    )
    print(f"infinite cache: {_share(hits, blocks)} of blocks; {fleet.engines} engines with")
    print(f"{fleet.host_blocks:,} blocks each, and an L3 of {fleet.storage_blocks:,} blocks")


def _hit_row(name: str, figures: FleetFigures, block_nbytes: int, requests: int) -> list[str]:
    hits = figures.host_hits + figures.storage_hits
    return [
        name,
        *(f"{n / figures.blocks:.3f}" for n in (hits, figures.host_hits, figures.storage_hits)),
        *(f"{n * block_nbytes / _TB:.2f} TB" for n in (figures.storage_hits, figures.written)),
        f"{figures.waited_s / requests:.2f} s",
    ]


def _write_row(name: str, figures: FleetFigures) -> list[str]:
    hits = figures.host_hits + figures.storage_hits
    counts = (figures.offered, figures.refused, figures.found)
    return [
        name,
        _share(hits, figures.blocks),
        *(f"{number:,}" for number in counts),
        f"{figures.written:,}",
        f"{figures.duplicates:,} ({_share(figures.duplicates, figures.written)})",
        f"{figures.again:,}",
    ]


def _loads(figures: FleetFigures, spaces: Sequence[tuple[KeySpace, float]]) -> list[str]:
    tables = [placement(spaces, number) for number in _SERVERS]
    return [
        ", ".join(
            f"{max_over_mean(counts, table):.2f}" for counts in (figures.reads, figures.writes)
        )
        for table in tables
    ]


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"\n{markdown_head(titles)}")
    for row in rows:
        print(markdown_row(row))


if __name__ == "__main__":
    main()
