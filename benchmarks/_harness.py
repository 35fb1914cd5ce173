"""Measure candidates in turns, and print tables of medians with their spread.

Candidates take turns in one process, in a different order each round. So a slow phase of the
machine affects all of them, and no candidate always follows the same other one. A ratio is the
median of the ratios within each round; it never compares figures from different times.
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
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

KIB, MIB = 1 << 10, 1 << 20

# Without a terminal, make tables wide enough for whole names.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class Candidate:
    """One way to do the work."""

    name: str

    def prepare(self, turn: int) -> None:
        """Prepare the work. Not timed."""

    def run(self) -> None:
        """Do the work. Timed."""
        raise NotImplementedError

    def check(self) -> None:
        """Prove that the work was done, and clean up. Not timed.

        Raise an exception if the work was not done.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table: candidates that did the same work."""

    title: str
    unit: str
    work: float
    """How much work one run does: GB moved, or millions of pages hashed."""
    seconds: Mapping[str, Sequence[float]]
    """The times of each candidate, in the order of the rounds."""
    baselines: Sequence[str]
    """Candidates that the others are compared with."""

    def rates(self, name: str) -> list[float]:
        """Return the units per second, round by round."""
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
    """A minimum for a figure. It is printed as met or not; missing it does not fail the benchmark."""

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

    @classmethod
    def begin(
        cls,
        path: Path | None = None,
        *,
        distributions: Iterable[str] = (),
        facts: Mapping[str, str] | None = None,
    ) -> Report:
        """Return an empty report for this machine, and print the facts."""
        report = cls({**machine_facts(path, distributions=distributions), **(facts or {})})
        for name, value in report.facts.items():
            console.print(f"{name:>9}  {value}", highlight=False, markup=False)
        console.print()
        return report

    def measure(
        self,
        title: str,
        candidates: Sequence[Candidate],
        rounds: int,
        *,
        work: float,
        unit: str = "GB/s",
        baselines: Sequence[str] = (),
    ) -> Section:
        """Run the candidates in turns, and add their table. Leave out baselines that did not run."""
        seconds = interleave(candidates, rounds)
        present = [name for name in baselines if name in seconds]
        return self.add(
            Section(title=title, unit=unit, work=work, seconds=seconds, baselines=present)
        )

    def add(self, section: Section) -> Section:
        """Store a section, and print it."""
        self.sections.append(section)
        console.print(table(section))
        return section

    def aim(self, section: Section, name: str, baseline: str, least: float) -> None:
        """Record whether `name` is at least `least` times as fast as `baseline`, if both ran."""
        if name in section.seconds and baseline in section.seconds:
            text = f"{section.title}: {name} / {baseline}"
            self.aims.append(Aim(text, least, section.ratio(name, baseline)))

    def print_aims(self) -> None:
        for aim in self.aims:
            mark = "met    " if aim.met else "NOT MET"
            console.print(f"{mark}  {aim.reached:6.2f} (aim {aim.least:.2f})  {aim.text}")

    def finish(self, path: Path | None) -> None:
        """Print the aims, and write everything as JSON to `path`."""
        self.print_aims()
        if path is not None:
            self.write(path)

    def write(self, path: Path) -> None:
        """Write everything so far as JSON, including every single time."""
        whole = asdict(self)
        for aim, plain in zip(self.aims, whole["aims"], strict=True):
            plain["met"] = aim.met
        for section, plain in zip(self.sections, whole["sections"], strict=True):
            plain["ratios"] = section.ratios()
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def interleave(candidates: Sequence[Candidate], rounds: int) -> dict[str, list[float]]:
    """Run all candidates `rounds` times, in changing order. Return their times.

    An extra round comes first and is not counted. It warms up, and checks that every candidate does
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
    """Return the page hashes of one batch. They differ for every candidate and turn."""
    return [
        hashlib.sha256(f"{name} {turn} {number}".encode()).hexdigest() for number in range(pages)
    ]


class Parser(argparse.ArgumentParser):
    """A parser with the options of all benchmarks, and further ones that a benchmark selects."""

    def __init__(
        self,
        doc: str | None,
        *,
        rounds: int | None = None,
        page_sizes: Iterable[int] = (),
        multiple: int = 1,
        quick_rounds: int | None = None,
        path: bool = False,
    ) -> None:
        """Add the options.

        Args:
            doc: The module's docstring.
            rounds: Rounds of each table. None: by page size.
            page_sizes: The default of `--sizes`, in bytes. Empty: there is no such option.
            multiple: Each size must be a multiple of this many KiB.
            quick_rounds: Rounds with `--quick`, which leaves out pages of 4 MiB.
            path: Add `--path`, a directory for files.
        """
        super().__init__(description=(doc or "").partition("\n")[0], allow_abbrev=False)
        add = self.add_argument
        shown = "by page size" if rounds is None else "%(default)s"
        add("--rounds", type=int, default=rounds, help=f"of each table (default: {shown})")
        add("--json", type=Path, metavar="FILE", help="write all times there")
        self._multiple = multiple
        if defaults := list(page_sizes):
            texts = ",".join(str(size // KIB) for size in defaults)
            help_text = f"sizes in KiB (default: {texts})"
            add("--sizes", type=sizes, default=defaults, metavar="KIB,KIB", help=help_text)
        if quick_rounds is not None:
            help_text = f"{quick_rounds} rounds, and no pages of 4 MiB"
            add("--quick", action="store_const", const=quick_rounds, help=help_text)
        if path:
            add("--path", type=Path, help="where to put files (default: a new directory)")

    def parsed(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Return the checked options, after the changes that `--quick` makes to them."""
        options = self.parse_args(arguments)
        given = vars(options)
        if given.get("quick"):
            options.sizes = [size for size in options.sizes if size < 4 * MIB]
            options.rounds = options.rounds or options.quick
        if options.rounds is not None and options.rounds < 1:
            self.error("--rounds: at least 1")
        if any(size <= 0 or size % (self._multiple * KIB) for size in given.get("sizes", ())):
            self.error(f"--sizes: a page has a multiple of {self._multiple} KiB")
        if given.get("path") is not None and not options.path.is_dir():
            self.error(f"--path: {options.path} is no directory")
        return options


def names(text: str) -> list[str]:
    """Split an option that accepts several names."""
    return text.split(",")


@contextmanager
def scratch(parent: Path | None) -> Generator[Path, None, None]:
    """Provide a new directory for files. It is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=parent) as name:
        yield Path(name)


def size_text(nbytes: int) -> str:
    """Return a size in MiB if it is a whole number of them, else in KiB."""
    return f"{nbytes // MIB} MiB" if nbytes % MIB == 0 else f"{nbytes // KIB} KiB"


def sizes(text: str) -> list[int]:
    """Parse `--sizes`, a list in KiB. Return bytes."""
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


def run_verb(verb: str, *flags: str) -> dict[str, Any]:
    """Run `hicache VERB --json`, and return the figures that it writes."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "hicache_storage.cli", verb, "--json", file.name, *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report: dict[str, Any] = json.loads(Path(file.name).read_text(encoding="utf-8"))
    return report


def markdown_row(cells: Iterable[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def markdown_head(titles: Sequence[str]) -> str:
    """Return the first two lines of a Markdown table."""
    return f"{markdown_row(titles)}\n{markdown_row(['---'] * len(titles))}"


def machine_facts(path: Path | None = None, *, distributions: Iterable[str] = ()) -> dict[str, str]:
    """Return what the figures depend on: processor, kernel, file system and versions."""
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
    """Return the installed version. A working tree on `PYTHONPATH` has no version."""
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
    """Return the type and mount point of the file system that contains `path`."""
    mounts: list[tuple[str, str]] = []
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, mount_point, kind, *_ = line.split()
        if path.resolve().is_relative_to(mount_point):
            mounts.append((mount_point, kind))
    mount_point, kind = max(mounts, key=lambda mount: len(mount[0]))
    return f"{kind} at {mount_point}"
