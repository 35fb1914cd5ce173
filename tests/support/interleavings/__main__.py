"""Explore interleavings: `make explore`, `make explore SCENARIO=controller SEED=17`.

Environment: SEEDS is the number of seeds for each scenario, FIRST_SEED the first one, SCENARIO the name
of one scenario, SEED the seed to repeat. STATEMENTS adds a point before each statement of the code
under test. With `--defects` (`make explore-proof`), mended defects are put back one after another, and
the output shows the seeds that find them.
"""

from __future__ import annotations

import os
import sys

from interleavings.defects import DEFECTS
from interleavings.explorer import explore
from interleavings.scenarios import SCENARIOS

_DEFECT_SEEDS = 10_000


def explore_scenarios() -> int:
    """Explore all scenarios or one. Return the exit code."""
    name, seed = os.environ.get("SCENARIO"), os.environ.get("SEED")
    if (name and name not in SCENARIOS) or (seed and not name):
        print(f"SEED needs a SCENARIO, which is one of {', '.join(SCENARIOS)}")
        return 2
    first = int(os.environ.get("FIRST_SEED", "0"))
    seeds = range(first, first + int(os.environ.get("SEEDS", "100000")))
    statements = bool(os.environ.get("STATEMENTS"))
    failures = 0
    for scenario in [SCENARIOS[name]] if name else SCENARIOS.values():
        report = explore(scenario, [int(seed)] if seed else seeds, statements=statements)
        print(report, flush=True)
        if report.failure is not None:
            failures += 1
            print(report.failure, flush=True)
    return 1 if failures else 0


def prove_defects() -> int:
    """Put each defect back, and find it. Return the exit code."""
    missed = 0
    for name, defect in DEFECTS.items():
        with defect.put_back():
            report = explore(SCENARIOS[defect.scenario], range(_DEFECT_SEEDS))
        print(f"{name}: {defect.text}")
        if report.failure is None:
            missed += 1
            print(f"  not found by {report.runs} seeds of {defect.scenario}", flush=True)
            continue
        shrunk = report.failure.shrunk
        print(
            f"  seed {report.failure.seed} of {defect.scenario}, after {report.runs} runs and"
            f" {report.seconds:.1f} s: {report.failure.first.finding};"
            f" {len(shrunk.deviations)} choices",
            flush=True,
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(prove_defects() if "--defects" in sys.argv else explore_scenarios())
