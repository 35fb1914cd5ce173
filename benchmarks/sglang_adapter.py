"""Measure the processor time for each page that SGLang's adapter moves.

    PYTHONPATH=tests/support .venv-sglang-engine/bin/python -W ignore benchmarks/sglang_adapter.py

A call moves 128 pages, as SGLang's controller does, from or to its host pool. The time covers the
whole process: the adapter, the page store with checksums, and the storage, which is in memory. Pages
are small, so that bytes matter little.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
from sglang_engine import Engine, PoolPlan, engine_world, hashes_of

if TYPE_CHECKING:
    from collections.abc import Callable

_PAGES = 128
_CALLS = 50
_CONFIG = {
    "module_path": "hicache_storage.integrations.sglang",
    "class_name": "SGLangHiCacheStorage",
    "interface_v1": 1,
}
_STORES: dict[str, dict[str, Any]] = {
    "memory": {},
    "file": {"durability": "crash"},
    "hf3fs": {"direct": False},
}


def config_of(store: str, root: str) -> dict[str, Any]:
    """Return SGLang's extra config for a store."""
    place = {} if store == "memory" else {"path": root}
    return {**_CONFIG, "backend_name": store, **_STORES[store], **place}


def us_a_page(call: Callable[[], object], rounds: int) -> list[float]:
    """Return the processor time per page in each round, after an uncounted first round."""
    times: list[float] = []
    for round_number in range(rounds + 1):
        began_s = time.process_time()
        for _ in range(_CALLS):
            call()
        if round_number:
            times.append((time.process_time() - began_s) / _CALLS / _PAGES * 1e6)
    return times


def calls_of(engine: Engine) -> dict[str, Callable[[], object]]:
    """Return the calls of SGLang's controller by name.

    The set comes first, because the other calls find the pages that it stores.
    """
    storage, tokens = engine.storage, _PAGES * engine.page_tokens
    keys, indices = hashes_of(range(tokens), engine.page_tokens), torch.arange(tokens)
    return {
        "set": lambda: storage.batch_set_v1(keys, indices),
        "get": lambda: storage.batch_get_v1(keys, indices),
        "exists": lambda: storage.batch_exists(keys),
    }


def profile(name: str, call: Callable[[], object]) -> None:
    """Print where the time of a call goes."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(_CALLS):
        call()
    profiler.disable()
    print(name)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(15)


def main() -> None:
    """Print a table with a row for each layout of the host pool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--store", choices=list(_STORES), default="memory", help="the backend, in a new directory"
    )
    parser.add_argument("--profile", action="store_true", help="print where the time goes instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for layout in ("page_first", "layer_first"):
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm") as root,
            engine_world(),
            Engine(
                [PoolPlan(layout=layout)], config_of(arguments.store, root), pages=2 * _PAGES
            ) as engine,
        ):
            engine.fill(1)
            for name, call in calls_of(engine).items():
                if arguments.profile:
                    profile(f"{layout}, {name}", call)
                    continue
                times = us_a_page(call, arguments.rounds)
                print(
                    f"{layout:12} {name:8} {statistics.median(times):6.2f} us a page"
                    f" [{min(times):.2f} .. {max(times):.2f}]"
                )


if __name__ == "__main__":
    main()
