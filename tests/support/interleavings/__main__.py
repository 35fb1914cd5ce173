"""Explore interleavings: `make explore`, `make explore SCENARIO=controller SEED=17`.

Environment: SEEDS is the number of seeds for each scenario, SCENARIO the name of one, SEED the seed
to repeat, FIRST_SEED the first seed.
"""

from __future__ import annotations

import os
import sys

from interleavings.explorer import explore
from interleavings.scenarios import SCENARIOS


def main() -> int:
    """Explore all scenarios or one. Return the exit code."""
    name, seed = os.environ.get("SCENARIO"), os.environ.get("SEED")
    if name and name not in SCENARIOS:
        print(f"there is no scenario {name!r}: choose one of {', '.join(SCENARIOS)}")
        return 2
    first = int(os.environ.get("FIRST_SEED", "0"))
    seeds = range(first, first + int(os.environ.get("SEEDS", "100000")))
    failures = 0
    for scenario in [SCENARIOS[name]] if name else SCENARIOS.values():
        report = explore(scenario, [int(seed)] if seed else seeds)
        print(report, flush=True)
        if report.failure is not None:
            failures += 1
            print(report.failure, flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
