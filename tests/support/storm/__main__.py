"""Runs storms over the stores, one after the other.

    PYTHONPATH=tests/support python -m storm [--stores file,redis] [--kills N] [--seed N] [--fresh]
    PYTHONPATH=tests/support python -m storm --calls N ...

Each store has a line with its figures, followed by lines with its findings. After a finding the exit
code is 1. The progress is kept in artifacts/storm, and the next run with the same seed goes on from
there.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import pytest
from servers import ROOT

from storm.calls import CALL_WORLDS, call
from storm.progress import Progress
from storm.storm import go_on
from storm.worlds import WORLDS

_KEPT = ROOT / "artifacts" / "storm"


def _end(_: int, __: FrameType | None) -> None:
    """Exit with an exception, so that networks and disks are taken down."""
    sys.exit(143)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the storms that the flags ask for."""
    parser = argparse.ArgumentParser(prog="storm")
    parser.add_argument("--stores", type=lambda text: text.split(","), metavar="NAME,NAME")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--calls", type=int, help="calls with faults, of all stores, and no kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="begin anew with this seed")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)
    names = options.stores or (WORLDS if options.calls is None else CALL_WORLDS)
    failed = False
    for name in names:
        kind = "kills" if options.calls is None else "calls"
        kept = _KEPT / f"{kind}-{name}.json"
        progress = Progress.load(kept, options.seed, fresh=options.fresh)
        try:
            with (
                tempfile.TemporaryDirectory(prefix="hicache-storm-") as scratch,
                WORLDS[name](Path(scratch)) as world,
            ):
                if options.calls is None:
                    go_on(world, progress, kills=options.kills)
                else:
                    call(world, progress, calls=-(-options.calls // len(names)))
        except pytest.skip.Exception as reason:
            sys.stdout.write(f"{name}: {reason}\n")
        else:
            sys.stdout.write(progress.report(name) + "\n")
        sys.stdout.flush()
        failed = failed or bool(progress.findings)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
