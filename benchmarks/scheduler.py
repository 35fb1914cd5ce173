"""Compare storage and an engine's scheduler in one process with each in its own process.

    python benchmarks/scheduler.py [--stores file,redis] [--sizes KIB,KIB] [--rounds N] [--json FILE]

An engine's storage threads live in its scheduler's process, and share the interpreter lock with it. A
spinning scheduler runs Python without a pause; a yielding one waits for its device half of the time.
`make bench-scheduler` makes an environment that has SGLang's stores; elsewhere their rows are left out.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import _sglang
from _harness import (
    KIB,
    MIB,
    Aim,
    Candidate,
    Parser,
    Report,
    Section,
    console,
    interleave,
    names,
    page_hashes_of,
    scratch,
    size_text,
)
from _scheduler_stores import Place, openings
from _schedulers import (
    ALONE,
    ARRANGEMENTS,
    SPIN_APART,
    SPIN_BESIDE,
    YIELD_APART,
    YIELD_BESIDE,
    Arrangement,
    Mode,
    Scheduler,
    schedulers,
)
from _store import DIRECTIONS, memories
from rich.table import Table

from hicache_storage import native

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from _scheduler_stores import Subject
    from _schedulers import Schedulers

TRANSFERS = 4
PAGES = {64 * KIB: 512, 1 * MIB: 64, 4 * MIB: 16}
"""The pages of one transfer."""
ROUNDS = 11
HELD_TO_AIMS = ("file", "hf3fs", "redis", "s3")
MIN_OF_STORAGE = 0.85
MIN_OF_SCHEDULER = 0.95
_TURN_S = 0.5


@dataclass
class Turn(Candidate):
    """A candidate that moves batches in one direction while a scheduler runs, and counts its steps.

    A batch is cut into one transfer for each of the `threads`.
    """

    subject: Subject
    direction: str
    arrangement: Arrangement
    everyone: Schedulers
    threads: ThreadPoolExecutor
    transfers: int
    repeats: int
    step_s: list[float] = field(default_factory=list[float])
    """Seconds per step of the scheduler, round by round."""

    def __post_init__(self) -> None:
        self.name = self.arrangement.name

    def prepare(self, turn: int) -> None:
        store = self.subject.store
        store.source.stamp(turn)
        label = f"{self.name} {self.direction} {turn}"
        batches = 1 if self.direction == "get" else self.repeats
        self._batches = [
            page_hashes_of(f"{label} {number}", 0, store.source.pages) for number in range(batches)
        ]
        store.prepare_set(self._batches[-1])
        if self.direction == "get":
            store.set()
            store.prepare_get(self._batches[-1])
        self._scheduler: Scheduler = self.everyone.begin(self.arrangement)

    def run(self) -> None:
        began_s, began = time.perf_counter(), self._scheduler.steps
        last = self.repeats - 1
        # Transfers meet before the last batch, so that a slower one evicts no page of it.
        for numbers in (range(last), range(last, self.repeats)):
            list(self.threads.map(partial(self._move, numbers), range(self.transfers)))
        taken_s, steps = time.perf_counter() - began_s, self._scheduler.steps - began
        self.step_s.append(taken_s / max(1, steps))
        self.seconds = taken_s

    def check(self) -> None:
        self._scheduler.begin(Mode.REST)
        store = self.subject.store
        if self.direction == "set":
            store.read_back(self._batches[-1])
        else:
            store.prove()
        self.subject.empty()

    def _move(self, numbers: range, transfer: int) -> None:
        """Move one transfer of each of these batches, one after the other."""
        store = self.subject.store
        pages = store.source.pages // self.transfers
        part = slice(transfer * pages, (transfer + 1) * pages)
        for number in numbers:
            if self.direction == "get":
                store.get_part(self._batches[-1][part], part)
            else:
                store.set_part(self._batches[number][part], part)


@dataclass(frozen=True, slots=True)
class Result:
    """The figures for one store, direction and page size."""

    store: str
    direction: str
    page_nbytes: int
    storage: Section
    scheduler: Section

    @property
    def storage_ratio(self) -> float:
        """The speed of storage beside a spinning scheduler, relative to running in two processes."""
        return self.storage.ratio(SPIN_BESIDE.name, SPIN_APART.name)

    @property
    def scheduler_ratio(self) -> float:
        """The speed of a yielding scheduler beside storage, relative to running in two processes."""
        return self.scheduler.ratio(YIELD_BESIDE.name, YIELD_APART.name)

    @property
    def spinning_ratio(self) -> float:
        """The speed of a spinning scheduler beside storage, relative to running in two processes."""
        return self.scheduler.ratio(SPIN_BESIDE.name, SPIN_APART.name)

    @property
    def line(self) -> str:
        return (
            f"{self.store}, {self.direction}, {size_text(self.page_nbytes)}: storage"
            f" {self.storage_ratio:.2f}, yielding scheduler {self.scheduler_ratio:.2f}"
        )

    def rate(self, arrangement: Arrangement) -> float:
        return statistics.median(self.storage.rates(arrangement.name))


def measure(
    subject: Subject,
    direction: str,
    everyone: Schedulers,
    options: argparse.Namespace,
    report: Report,
) -> Result:
    """Measure one store in one direction, in all arrangements."""
    source = subject.store.source
    with ThreadPoolExecutor(options.transfers) as threads:
        turn = partial(
            Turn,
            subject,
            direction,
            everyone=everyone,
            threads=threads,
            transfers=options.transfers,
        )
        repeats = _repeats(turn(arrangement=ALONE, repeats=1))
        turns = [turn(arrangement=each, repeats=repeats) for each in ARRANGEMENTS]
        seconds = interleave(turns, options.rounds)
    pages = source.pages // options.transfers
    size = size_text(source.page_nbytes)
    what = f"{subject.name}, {direction}, {options.transfers} transfers of {pages} pages of {size}"
    apart = (SPIN_APART.name, YIELD_APART.name)
    storage = Section(
        title=f"{what}: storage",
        unit="GB/s",
        work=repeats * source.pages * source.page_nbytes / 1e9,
        seconds=seconds,
        baselines=(ALONE.name, *apart),
    )
    scheduler = Section(
        title=f"{what}: the scheduler",
        unit="steps/ms",
        work=1e-3,
        seconds={turn.name: turn.step_s[1:] for turn in turns if turn.arrangement is not ALONE},
        baselines=apart,
    )
    report.sections += [storage, scheduler]
    return Result(subject.name, direction, source.page_nbytes, storage, scheduler)


def _repeats(turn: Turn) -> int:
    """Return how many batches take about `_TURN_S` without a scheduler."""
    for number in (-1, -2):
        turn.prepare(number)
        turn.run()
        turn.check()
    most = turn.subject.most_repeats if turn.direction == "set" else 64
    return min(most, max(1, round(_TURN_S / turn.seconds)))


def table(results: Sequence[Result]) -> Table:
    """Return the table of all results."""
    shown = Table(title="medians; ratios within rounds", title_justify="left")
    shown.add_column("store")
    shown.add_column("")
    shown.add_column("page", justify="right")
    for name in ("alone", "spinning apart", "spinning beside"):
        shown.add_column(f"GB/s, {name}", justify="right")
    for name in ("storage beside / apart", "spinning scheduler", "yielding scheduler"):
        shown.add_column(name, justify="right")
    for result in results:
        rates = [result.rate(each) for each in (ALONE, SPIN_APART, SPIN_BESIDE)]
        ratios = [result.storage_ratio, result.spinning_ratio, result.scheduler_ratio]
        shown.add_row(
            result.store,
            result.direction,
            size_text(result.page_nbytes),
            *[f"{value:.2f}" for value in (*rates, *ratios)],
        )
    return shown


def aims(result: Result) -> list[Aim]:
    """Return the aims for one result. Other projects' stores and remote stores have none."""
    if result.store not in HELD_TO_AIMS:
        return []
    what = f"{result.store}, {result.direction}, {size_text(result.page_nbytes)}"
    return [
        Aim(f"{what}: storage beside a spinning scheduler", MIN_OF_STORAGE, result.storage_ratio),
        Aim(
            f"{what}: a yielding scheduler beside storage", MIN_OF_SCHEDULER, result.scheduler_ratio
        ),
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__, rounds=ROUNDS, page_sizes=PAGES, path=True)
    known = openings()
    parser.add_argument(
        "--stores",
        type=names,
        default=list(known),
        help=f"stores to measure (default: {','.join(known)})",
    )
    parser.add_argument("--pages", type=int, help="pages of a transfer (default: by page size)")
    parser.add_argument(
        "--transfers", type=int, default=TRANSFERS, help="transfers at a time (default: 4)"
    )
    parser.add_argument(
        "--parallelism", type=int, help="storage calls of a page store at a time (default: many)"
    )
    parser.add_argument(
        "--switch-interval",
        type=float,
        metavar="S",
        help="sys.setswitchinterval of all processes (default: Python's)",
    )
    options = parser.parsed(arguments)
    for name in options.stores:
        if name not in known:
            parser.error(f"--stores: no {name} here, only {', '.join(known)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.switch_interval:
        sys.setswitchinterval(options.switch_interval)
    results: list[Result] = []
    with schedulers() as everyone:
        facts = {
            "data plane": native.implementation,
            "switch": f"every {1000 * sys.getswitchinterval():g} ms",
        }
        where = options.path or Path(tempfile.gettempdir())
        report = Report.begin(where, distributions=["numpy", *_sglang.libraries()], facts=facts)
        for page_nbytes in options.sizes:
            pages = options.transfers * (options.pages or PAGES.get(page_nbytes, 16))
            batch = memories(pages, page_nbytes)
            for name in options.stores:
                with scratch(options.path) as directory:
                    place = Place(directory, *batch, options.parallelism)
                    with openings()[name](place) as subject:
                        for direction in DIRECTIONS:
                            result = measure(subject, direction, everyone, options, report)
                            results.append(result)
                            console.print(result.line)
                            report.aims += aims(result)
    console.print(table(results))
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
