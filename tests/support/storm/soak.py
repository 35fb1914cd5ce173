"""A soak: a million requests through engines of several pools and ranks. A later run can continue it.

    PYTHONPATH=tests/support python -m storm.soak [--requests N] [--seed N] [--fresh]

Most requests come from four clients of one engine with three pools, whose two stores fail, are
detached and come back. Every fiftieth is handed from a prefill engine of two ranks to a decode engine
of two ranks, over a store that fails. The soak checks:

- No page has wrong bytes, and all ranks get equally many.
- A round leaves no pinned page, slot, quota, thread or descriptor, and memory does not grow.
- Counters add up, and no internal error is counted.

After a finding the exit code is 1. The progress is kept in artifacts/storm/soak.json.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Sequence

from engines import leaked
from hicache_conformance.tools.processes.resources import (
    ProcessResources,
    remaining_after,
    resident_nbytes,
)
from servers import ROOT

from storm.progress import Progress
from storm.soak_clients import GROWTH_NBYTES, flapping_storage, soaked, soaking_engine
from storm.soak_handoffs import Handoffs

ROUND = 10_000
_HANDED_OVER = 50
"""One of this many requests is handed over."""
_LEFT_LIMIT_S = 20.0
_WARM_ROUNDS = 2
"""After this many rounds, the memory of a process must not grow any more."""


def soak(progress: Progress, requests: int) -> None:
    """Serve rounds of requests, until this many are served or a round has a finding."""
    warm_nbytes = rounds = 0
    while progress.figures["requests"] < requests and not progress.findings:
        before = ProcessResources.current() if rounds else None
        progress.figures["rounds"] += 1
        todo = min(ROUND, requests - progress.figures["requests"])
        seed = progress.seed * 1_000_000 + progress.figures["rounds"]
        _serve_clients(progress, todo - todo // _HANDED_OVER, seed)
        _hand_over(progress, todo // _HANDED_OVER, seed)
        rounds += 1
        if before is not None:
            progress.findings += [
                f"a round left {each}" for each in remaining_after(before, _LEFT_LIMIT_S)
            ]
        if rounds == _WARM_ROUNDS:
            warm_nbytes = resident_nbytes()
        elif warm_nbytes and resident_nbytes() - warm_nbytes > GROWTH_NBYTES:
            progress.findings.append(f"{resident_nbytes() - warm_nbytes} more bytes are held")
        progress.save()


def _serve_clients(progress: Progress, requests: int, seed: int) -> None:
    stores = [flapping_storage(2 * seed + number, calls=20 * requests) for number in range(2)]
    seen: Counter[str] = Counter()
    with soaking_engine() as engine:
        served, wrong = soaked(engine, requests, stores, seen, seed)
        progress.findings += wrong + leaked(engine)
        done = engine.stats()
    progress.figures["requests"] += served
    for name in ("l2_hit_pages", "l3_hit_pages", "written_pages", "evicted_pages"):
        progress.figures[name] += done.get(name, 0)
    if done["requests"] + done["cancelled_requests"] != served:
        progress.findings.append(f"{served} requests were served, and counted as {done}")
    if "internal_errors" in done:
        progress.findings.append(f"{done['internal_errors']} internal errors")
    for store in stores:
        progress.figures["faults"] += sum(store.struck.values())
        store.close()


def _hand_over(progress: Progress, requests: int, seed: int) -> None:
    with Handoffs(seed) as handoffs:
        for number in range(requests):
            progress.findings += handoffs.serve(number)
        progress.findings += handoffs.leaked()
    progress.figures["requests"] += requests
    progress.figures["handed over"] += requests
    progress.figures["pages handed over"] += handoffs.handed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak that the flags ask for."""
    parser = argparse.ArgumentParser(prog="storm.soak")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="begin anew with this seed")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # of each fault
    kept = ROOT / "artifacts" / "storm" / "soak.json"
    progress = Progress.load(kept, options.seed, fresh=options.fresh)
    soak(progress, options.requests)
    sys.stdout.write(progress.report("soak") + "\n")
    return int(bool(progress.findings))


if __name__ == "__main__":
    sys.exit(main())
