"""Interleaved measurements, and tables of medians with their spread.

Candidates take turns in one process, each round in another order. So a slow phase of the machine
affects all of them, and no candidate always follows the same other one. A ratio is the median of
the ratios within each round, and never compares figures of different times.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import platform
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KIB, MIB = 1 << 10, 1 << 20

# Without a terminal, tables are wide enough for whole names.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class Candidate(Protocol):
    """One implementation of the work."""

    @property
    def name(self) -> str: ...

    def prepare(self, turn: int) -> None:
        """Prepare the work. Not timed."""

    def run(self) -> None:
        """Do the work. Timed."""

    def check(self) -> None:
        """Prove that the work was done, and clean up. Not timed.

        Raises an exception where the work was not done.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table: candidates that did the same work."""

    title: str
    unit: str
    work: float
    """Amount of work in one run: GB moved, or millions of pages hashed."""
    seconds: Mapping[str, Sequence[float]]
    """Times of each candidate, in the order of the rounds."""
    baselines: Sequence[str]
    """Candidates that the others are compared with."""

    def rates(self, name: str) -> list[float]:
        """Return units a second, round by round."""
        return [self.work / taken_s for taken_s in self.seconds[name]]

    def ratio(self, name: str, baseline: str) -> float:
        """Return the median over the rounds of the speed relative to `baseline`."""
        pairs = zip(self.seconds[baseline], self.seconds[name], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    def ratios(self) -> dict[str, dict[str, float]]:
        """Return the ratio of each candidate to each baseline."""
        return {
            name: {baseline: self.ratio(name, baseline) for baseline in self.baselines}
            for name in self.seconds
        }


@dataclass(frozen=True, slots=True)
class Aim:
    """A minimum for a figure. It is printed as met or not; a benchmark does not fail because of it."""

    text: str
    least: float
    reached: float

    @property
    def met(self) -> bool:
        return self.reached >= self.least


@dataclass(slots=True)
class Report:
    """The results of one run of a benchmark."""

    facts: dict[str, str]
    sections: list[Section] = field(default_factory=list[Section])
    aims: list[Aim] = field(default_factory=list[Aim])

    def add(self, section: Section) -> Section:
        """Keep a section, and print it."""
        self.sections.append(section)
        console.print(table(section))
        return section

    def print_facts(self) -> None:
        for name, value in self.facts.items():
            console.print(f"{name:>9}  {value}", highlight=False, markup=False)
        console.print()

    def print_aims(self) -> None:
        for aim in self.aims:
            mark = "met    " if aim.met else "NOT MET"
            console.print(f"{mark}  {aim.reached:6.2f} (aim {aim.least:.2f})  {aim.text}")

    def finish(self, path: Path | None) -> None:
        """Print the aims; write everything as JSON to `path`."""
        self.print_aims()
        if path is not None:
            self.write(path)

    def write(self, path: Path) -> None:
        """Write everything so far as JSON, with every single time."""
        whole = asdict(self)
        for aim, plain in zip(self.aims, whole["aims"], strict=True):
            plain["met"] = aim.met
        for section, plain in zip(self.sections, whole["sections"], strict=True):
            plain["ratios"] = section.ratios()
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def interleave(candidates: Sequence[Candidate], rounds: int) -> dict[str, list[float]]:
    """Run all candidates `rounds` times, in changing order; return their times.

    One more round comes first and is not counted. It warms up, and checks that every candidate does
    the work.
    """
    seconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds + 1):
            for candidate in random.Random(turn).sample(candidates, len(candidates)):
                taken_s = _timed(candidate, turn)
                if turn:
                    seconds[candidate.name].append(taken_s)
    finally:
        gc.enable()
    return seconds


def page_hashes_of(name: str, turn: int, pages: int) -> list[str]:
    """Return page hashes of one batch, which differ for every candidate and turn."""
    return [
        hashlib.sha256(f"{name} {turn} {number}".encode()).hexdigest() for number in range(pages)
    ]


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark. `doc` is the module's docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, help="rounds of each table (default: by page size)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there")
    return parser


def size_text(nbytes: int) -> str:
    """Return a size in MiB if it is whole MiB, else in KiB."""
    return f"{nbytes // MIB} MiB" if nbytes % MIB == 0 else f"{nbytes // KIB} KiB"


def sizes(text: str) -> list[int]:
    """Return the sizes in bytes of `--sizes`, a list of KiB."""
    return [int(part) * KIB for part in text.split(",")]


def table(section: Section) -> Table:
    """Return a table of medians, spread and ratios."""
    shown = Table(title=section.title, title_justify="left", title_style="bold")
    shown.add_column("candidate")
    shown.add_column(section.unit, justify="right")
    shown.add_column(r"\[min .. max]", justify="right")
    for baseline in section.baselines:
        shown.add_column(f"x {baseline}", justify="right")
    for name in section.seconds:
        rates = section.rates(name)
        shown.add_row(
            name,
            f"{statistics.median(rates):.2f}",
            rf"\[{min(rates):.2f} .. {max(rates):.2f}]",
            *[f"{section.ratio(name, baseline):.2f}" for baseline in section.baselines],
        )
    return shown


def machine_facts(path: Path | None = None, *, distributions: Sequence[str] = ()) -> dict[str, str]:
    """Return processor, kernel, file system and versions, which the figures depend on."""
    facts = {
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    if path is not None:
        facts["storage"] = _file_system(path)
    facts["versions"] = ", ".join(
        f"{name} {_version(name)}" for name in ("hicache-storage", *distributions)
    )
    return facts


def _version(distribution: str) -> str:
    """Return the installed version. A working tree on `PYTHONPATH` has none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _timed(candidate: Candidate, turn: int) -> float:
    candidate.prepare(turn)
    start_s = time.perf_counter()
    candidate.run()
    taken_s = time.perf_counter() - start_s
    candidate.check()
    return taken_s


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(path: Path) -> str:
    """Return the type and mount point of the file system of `path`."""
    mounts: list[tuple[str, str]] = []
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, mount_point, kind, *_ = line.split()
        if path.resolve().is_relative_to(mount_point):
            mounts.append((mount_point, kind))
    mount_point, kind = max(mounts, key=lambda mount: len(mount[0]))
    return f"{kind} at {mount_point}"
