"""Storms over the stores, one after the other.

    PYTHONPATH=tests/support python -m storm [--stores file,redis] [--kills N] [--seed N]

A store's line has its figures, and the lines below it what was found. A finding makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from storm.storm import rage
from storm.worlds import WORLDS

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the storms that the flags ask for."""
    parser = argparse.ArgumentParser(prog="storm")
    parser.add_argument(
        "--stores", type=lambda text: text.split(","), default=list(WORLDS), metavar="NAME,NAME"
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    failed = False
    for name in options.stores:
        with (
            tempfile.TemporaryDirectory(prefix="hicache-storm-") as scratch,
            WORLDS[name](Path(scratch)) as world,
        ):
            began_s = time.monotonic()
            storm = rage(world, kills=options.kills, seed=options.seed)
            if storm.findings and "again" in __import__("os").environ:
                from storm.storm import Process, check
                for _ in range(2):
                    again = Process(check, world).result()
                    print([(sight.space, set(sight.asked)-set(sight.found)) for sight in again])
                print(*storm.timeline(), sep="\n")
                import subprocess; subprocess.run(["tail", "-40", str(Path(scratch)/"server"/"log")])
            figures = {**storm.figures, "seconds": round(time.monotonic() - began_s)}
        lines = [f"{name}, seed {options.seed}: {json.dumps(figures)}", *storm.findings]
        sys.stdout.write("\n  ".join(lines) + "\n")
        sys.stdout.flush()
        failed = failed or bool(storm.findings)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
