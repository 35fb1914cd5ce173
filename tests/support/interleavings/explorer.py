"""Runs a scenario with many seeds, and shortens the schedule of a run that found something."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

from interleavings.patching import Patches, patched
from interleavings.primitives import Thread
from interleavings.scenario import Scenario
from interleavings.scheduler import Finding, Scheduler, Step
from interleavings.statements import with_points
from interleavings.strategies import Key, Replay, Strategy, of_seed

_MAX_SHRINKING_RUNS = 1000


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a scenario."""

    finding: Finding | None
    deviations: Mapping[Key, int]
    """The choices of the run that differ from the default choice."""
    points: int
    threads: int
    steps: list[Step] = field(default_factory=list[Step])

    @property
    def digest(self) -> str:
        """A digest of all choices. Equal runs have equal digests."""
        text = f"{self.points} {self.threads} {sorted(self.deviations.items())} {self.finding}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed whose run found something, and the shortest schedule that also finds it."""

    scenario: str
    seed: int
    first: Run
    shrunk: Run
    statements: bool = False

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.scenario}, seed {self.seed}: {self.shrunk.finding}",
                self.shrunk.finding.details if self.shrunk.finding else "",
                f"schedule, with {len(self.shrunk.deviations)} of {len(self.first.deviations)} choices:",
                *(
                    f"  {number:4d}  {step.now_s:10.6f} s  {step.thread:<22} {step.place}"
                    for number, step in enumerate(self.shrunk.steps)
                ),
                f"again: make explore SCENARIO={self.scenario} SEED={self.seed}"
                + " STATEMENTS=1" * self.statements,
            ]
        )


@dataclass(slots=True)
class Report:
    """The runs of one scenario."""

    scenario: str
    runs: int = 0
    points: int = 0
    threads: int = 0
    schedules: set[str] = field(default_factory=set[str])
    """The digests of the runs."""
    seconds: float = 0.0
    failure: Failure | None = None

    def __str__(self) -> str:
        rate = self.runs / self.seconds if self.seconds else 0.0
        points = self.points / self.runs if self.runs else 0.0
        return (
            f"{self.scenario:<16} {self.runs:>7} runs, {len(self.schedules):>7} different,"
            f" {points:>6.0f} points and {self.threads:>2} threads a run, {self.seconds:>7.1f} s,"
            f" {rate:>6.0f} runs/s: {'FOUND' if self.failure else 'nothing found'}"
        )


def explore(
    scenario: type[Scenario],
    seeds: Iterable[int],
    *,
    shrinks: bool = True,
    statements: bool = False,
) -> Report:
    """Run a scenario with each seed, until one finds something.

    With `statements`, a thread may also be switched before each statement of the code under test.
    """
    report = Report(scenario.name)
    began_s = time.perf_counter()
    with patched() as patches, with_points(patches) if statements else nullcontext():
        for seed in seeds:
            run = run_once(patches, scenario, of_seed(seed))
            report.runs += 1
            report.points += run.points
            report.threads = max(report.threads, run.threads)
            report.schedules.add(run.digest)
            if run.finding is not None:
                shrunk = shrink(patches, scenario, run) if shrinks else run
                report.failure = Failure(scenario.name, seed, run, shrunk, statements)
                break
    report.seconds = time.perf_counter() - began_s
    return report


def run_once(
    patches: Patches, scenario: type[Scenario], strategy: Strategy, *, traced: bool = False
) -> Run:
    """Run a scenario once."""

    def check() -> None:
        if made.ready:
            made.check()

    def main() -> None:
        with scheduler.uninterrupted():
            made.set_up()
            made.ready = True
            threads = [
                Thread(scheduler, target=target, name=name)
                for name, target in made.threads().items()
            ]
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join()
        made.finish()

    scheduler = Scheduler(strategy, check=check, time_passes=scenario.time_passes, traced=traced)
    made = scenario(scheduler)
    with made.replaced(), patches.runs(scheduler):
        finding = scheduler.run(main)
    return Run(
        finding, scheduler.deviations, scheduler.points, len(scheduler.tasks), scheduler.steps
    )


def shrink(patches: Patches, scenario: type[Scenario], run: Run) -> Run:
    """Return a run with the same kind of finding and as few deviations as possible."""
    assert run.finding is not None
    kind = run.finding.kind
    tries = 0

    def fails(deviations: Mapping[Key, int]) -> Run | None:
        nonlocal tries
        tries += 1
        again = run_once(patches, scenario, Replay(deviations))
        return again if again.finding is not None and again.finding.kind == kind else None

    best = fails(run.deviations) or run
    size = max(1, len(best.deviations) // 2)
    while tries < _MAX_SHRINKING_RUNS:
        keys = list(best.deviations)
        smaller = None
        for start in range(0, len(keys), size):
            gone = set(keys[start : start + size])
            kept = {key: value for key, value in best.deviations.items() if key not in gone}
            smaller = fails(kept)
            if smaller is not None and len(smaller.deviations) < len(best.deviations):
                best = smaller
                break
            smaller = None
            if tries >= _MAX_SHRINKING_RUNS:
                break
        if smaller is None:
            if size == 1:
                break
            size //= 2
        else:
            size = min(size, max(1, len(best.deviations)))
    return run_once(patches, scenario, Replay(best.deviations), traced=True)
