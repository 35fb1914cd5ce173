"""Run LMCache's own `lmcache bench l2` on our backends and on LMCache's adapters, in turns.

python benchmarks/lmcache_bench_l2.py [--rounds N] [--sizes 256,2048]

`make bench-lmcache-l2` makes its environment, and prints the table of docs/lmcache.md. Each run is a
process of its own with an empty store, five measured rounds of 32 objects, and a check of the bytes.

LMCache's benchmark gives each object a `kv_rank` of its own, so each is alone in its key space below our
adapter. Our backends therefore also run with `kv_rank` 0 for all objects ("one rank"), as an engine with
one GPU has it. LMCache's adapters only put the number into a name.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from _harness import KIB, Parser, console, markdown_head, markdown_row, scratch, size_text
from _servers import redis_server

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

SIZES = (256 * KIB, 2048 * KIB)
FLAGS = ("--num-keys", "32", "--rounds", "5", "--lookup-max-hit-rate", "1", "--no-skip-verify")
ONE_RANK = ", one rank"
PAIRS = {"file": ("fs", "fs_native"), "redis": ("resp",)}
"""Which of LMCache's adapters each of our backends is compared with."""
OPERATIONS = ("Store", "Load", "Lookup")
RATES = ("adapter", "object", "store, GB/s", "load, GB/s", "look-up of 32 objects, ms")
RATIOS = ("ours", "LMCache's", "object", "store", "load", "look-up")
_WITH_ONE_RANK = """
import dataclasses, sys
from lmcache.cli.commands.bench.l2_adapter_bench import data
from lmcache.cli.main import main

def make(*arguments, given=data.make_object_keys, **named):
    return [dataclasses.replace(key, kv_rank=0) for key in given(*arguments, **named)]

data.make_object_keys = make
sys.exit(main())
"""


def adapters(root: Path, port: int) -> dict[str, dict[str, Any]]:
    """Return the `--l2-adapter` of each candidate by name, in the order of a turn."""

    def ours(backend: str, config: dict[str, Any]) -> dict[str, Any]:
        fields = {"revision": "bench", "kv_dtype": "uint8", "backend": backend, "config": config}
        return {
            "type": "plugin",
            "module_path": "hicache_storage.integrations.lmcache",
            "class_name": "HiCacheL2Adapter",
            "adapter_params": fields,
        }

    file = ours("file", {"path": str(root)})
    redis_ours = ours("redis", {"url": f"redis://127.0.0.1:{port}/0"})
    return {
        "file": file,
        f"file{ONE_RANK}": file,
        "fs": {"type": "fs", "base_path": str(root)},
        "fs_native": {"type": "fs_native", "base_path": str(root)},
        "redis": redis_ours,
        f"redis{ONE_RANK}": redis_ours,
        "resp": {"type": "resp", "host": "127.0.0.1", "port": port},
    }


def bench(adapter: dict[str, Any], size: int, *, one_rank: bool) -> dict[str, float]:
    """Run the benchmark once. Return the median milliseconds of a round of each operation.

    A run whose bytes are wrong, or that loses an object, raises.
    """
    program = Path(sysconfig.get_path("scripts"), "lmcache")
    start = [sys.executable, "-W", "ignore", "-c", _WITH_ONE_RANK] if one_rank else [str(program)]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        shape = ("--data-size-kb", str(size // KIB), "--l2-adapter", json.dumps(adapter))
        command = [*start, "bench", "l2", *FLAGS, *shape, "--format", "json", "-q"]
        environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
        done = subprocess.run(
            [*command, "--output", file.name], env=environment, capture_output=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"lmcache bench l2 failed: {done.stderr.decode()[-2000:]}")
        metrics = json.loads(Path(file.name).read_text(encoding="utf-8"))["metrics"]
    found = {one["operation"]: one for name, one in metrics.items() if name.startswith("op_")}
    for name, one in found.items():
        if one["total_success"] != one["total_keys"]:
            raise RuntimeError(f"{name}: {one['total_success']} of {one['total_keys']} objects")
    return {name: found[name]["duration_p50_ms"] for name in OPERATIONS}


def measure(options: argparse.Namespace, size: int) -> dict[str, list[dict[str, float]]]:
    """Run every candidate once in each round, with an empty store."""
    taken: dict[str, list[dict[str, float]]] = {}
    with redis_server() as port:
        client: Any = redis.Redis(port=port)
        for turn in range(options.rounds):
            with scratch(options.path) as root:
                for name, adapter in adapters(root, port).items():
                    shutil.rmtree(root)
                    root.mkdir()
                    client.flushall()
                    found = bench(adapter, size, one_rank=name.endswith(ONE_RANK))
                    taken.setdefault(name, []).append(found)
            load = os.getloadavg()[0]
            console.print(f"{size_text(size)}, round {turn + 1}: load {load:.1f}", style="dim")
        client.close()
    return taken


def rates(taken: dict[str, list[dict[str, float]]], size: int) -> Iterator[list[str]]:
    """Yield the cells of each adapter's row."""
    for name, runs in taken.items():
        medians = {one: statistics.median(run[one] for run in runs) for one in OPERATIONS}
        speeds = [f"{32 * size / 1e6 / medians[one]:.2f}" for one in ("Store", "Load")]
        yield [name, size_text(size), *speeds, f"{medians['Lookup']:.1f}"]


def ratios(taken: dict[str, list[dict[str, float]]], size: int) -> Iterator[list[str]]:
    """Yield the cells of each pair's row: medians of their times in the same rounds."""
    for own, others in PAIRS.items():
        for name, theirs in itertools.product((own, own + ONE_RANK), others):
            pairs = list(zip(taken[name], taken[theirs], strict=True))
            found = [statistics.median(b[one] / a[one] for a, b in pairs) for one in OPERATIONS]
            yield [name, theirs, size_text(size), *[f"{ratio:.2f}" for ratio in found]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables."""
    options = Parser(__doc__, rounds=5, page_sizes=SIZES, path=True).parsed(arguments)
    runs = {size: measure(options, size) for size in options.sizes}
    if options.json:
        options.json.write_text(json.dumps(runs), encoding="utf-8")
    for titles, cells_of in ((RATES, rates), (RATIOS, ratios)):
        print(markdown_head(titles))
        for size, taken in runs.items():
            for cells in cells_of(taken, size):
                print(markdown_row(cells))
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
