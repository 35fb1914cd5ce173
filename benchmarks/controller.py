"""Compare the controller over the `memory` backend with a memcpy of the same bytes: the SDK's cost.

python benchmarks/controller.py [--sizes 64,4096] [--rounds N] [--profile] [--json FILE]
"""

from __future__ import annotations

import cProfile
import statistics
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from _controller_candidates import Backend, Controller, Memcpy, Store, Workload
from _harness import KIB, MIB, Aim, Candidate, Parser, Report, Section, console, size_text
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from _controller_candidates import TransferMethod

PAGES = {64 * KIB: 1024, 4 * MIB: 64}
ROUNDS = {64 * KIB: 21, 4 * MIB: 15}
LIMIT = "memcpy, 2 threads"
BARE = "memory backend"
CHECKED = "page store, xxh3"
MIN_OF_MEMCPY = 0.8
MAX_ADDED_US = 50.0
PROFILED_TURNS = 20
PROFILED_LINES = 15
# Conditions, events and futures wait with a lock, too.
WAITS = ("'acquire' of '_thread.lock'", "'get' of '_queue.SimpleQueue'")


class TransferRun(Candidate):
    """A candidate that moves all pages in one direction, and checks them."""

    def __init__(self, method: TransferMethod, direction: str) -> None:
        self.name = method.name
        self._method = method
        self._loads = direction == "L3 → L2"
        self.cpu_s: list[float] = []

    def prepare(self, turn: int) -> None:  # noqa: ARG002 - every turn is the same
        workload = self._method.workload
        if self._loads:
            workload.overwrite()
        else:
            workload.empty_storage()

    def run(self) -> None:
        began_s = time.process_time()
        (self._method.load if self._loads else self._method.save)()
        self.cpu_s.append(time.process_time() - began_s)

    def check(self) -> None:
        if not (self._method.loaded() if self._loads else self._method.saved()):
            raise RuntimeError(f"{self.name} did not bring all pages")
        self._method.forget()


def methods(workload: Workload) -> list[TransferMethod]:
    return [
        Memcpy(workload, 1),
        Memcpy(workload, 2),
        Backend(workload),
        Store(workload, "none"),
        Store(workload, "xxh3"),
        Controller(workload, "none"),
        Controller(workload, "xxh3"),
    ]


def measure(
    report: Report, workload: Workload, compared: list[TransferMethod], direction: str, rounds: int
) -> None:
    """Measure one direction. Add a table of rates and one of microseconds, and record the aims."""
    turns = [TransferRun(method, direction) for method in compared]
    section = report.measure(
        f"{direction}, {workload.pages} pages of {size_text(workload.page_nbytes)} and a draft's",
        turns,
        rounds,
        work=workload.request_nbytes / 1e9,
        baselines=[LIMIT, BARE, CHECKED],
    )
    cpu_s = {turn.name: turn.cpu_s[1:] for turn in turns}
    on_cpu = replace(section, title=f"{section.title}: processor time", seconds=cpu_s)
    report.sections.append(on_cpu)
    console.print(added_table(section, workload.pages, "µs a page, target and draft together"))
    console.print(added_table(on_cpu, workload.pages, "of the processor, on all threads"))
    where = f"{direction}, {size_text(workload.page_nbytes)}"
    for name in ("controller, none", "controller, xxh3"):
        if workload.page_nbytes >= MIB:
            text = f"{where}: {name} / {LIMIT}"
            report.aims.append(Aim(text, MIN_OF_MEMCPY, section.ratio(name, LIMIT)))
        else:
            over_us = added_us(section, name, BARE, workload.pages)
            text = f"{where}: {MAX_ADDED_US:.0f} µs / what {name} adds a page to {BARE}"
            report.aims.append(Aim(text, 1.0, MAX_ADDED_US / max(over_us, 1.0)))


def added_us(section: Section, name: str, baseline: str, pages: int) -> float:
    """Return how many microseconds longer a page takes than with `baseline`, as a median."""
    pairs = zip(section.seconds[name], section.seconds[baseline], strict=True)
    return statistics.median((ours - theirs) / pages * 1e6 for ours, theirs in pairs)


def added_table(section: Section, pages: int, title: str) -> Table:
    shown = Table(title=title, title_justify="left")
    shown.add_column("candidate")
    shown.add_column("all", justify="right")
    for baseline in section.baselines:
        shown.add_column(f"over {baseline}", justify="right")
    for name, taken_s in section.seconds.items():
        shown.add_row(
            name,
            f"{statistics.median(taken_s) / pages * 1e6:.1f}",
            *[f"{added_us(section, name, base, pages):.1f}" for base in section.baselines],
        )
    return shown


class ThreadProfiles:
    """cProfile on each thread that starts inside a `with`, and on this one while it is `watched`.

    The profiler adds about a microsecond to each Python call, so look at the shares, not at the
    seconds.
    """

    def __init__(self) -> None:
        self._own = cProfile.Profile()
        self._others: dict[str, cProfile.Profile] = {}

    def __enter__(self) -> Self:
        threading.setprofile(self._begin)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)

    @contextmanager
    def watched(self) -> Generator[None]:
        self._own.enable()
        yield
        self._own.disable()

    def table(self, title: str, pages: int) -> Table:
        """Return the most expensive functions of each thread. Call it after all threads have ended."""
        shown = Table(title=title, title_justify="left", title_style="bold")
        for column in ("thread", "function"):
            shown.add_column(column)
        for column in ("calls a page", "µs a page"):
            shown.add_column(column, justify="right")
        for name, profile in {"the caller's": self._own, **self._others}.items():
            working, waiting_s = _split(profile)
            if sum(entry.callcount for entry in working) < pages:
                continue  # this thread did no work
            shown.add_section()
            total_s = sum(entry.inlinetime for entry in working)
            shown.add_row(name, "waiting", "", f"{waiting_s / pages * 1e6:.2f}")
            shown.add_row("", "working", "", f"{total_s / pages * 1e6:.2f}")
            for entry in working[:PROFILED_LINES]:
                per_page = entry.callcount / pages
                each_us = entry.inlinetime / pages * 1e6
                shown.add_row("", f"  {_function(entry)}", f"{per_page:.2f}", f"{each_us:.2f}")
        return shown

    def _begin(self, *_: Any) -> None:
        """Start the profile of a new thread. `threading` calls this function as its first event."""
        sys.setprofile(None)
        profile = self._others.setdefault(threading.current_thread().name, cProfile.Profile())
        profile.enable()


def _split(profile: cProfile.Profile) -> tuple[list[Any], float]:
    """Return the functions by their own time, longest first, and the seconds spent waiting."""
    entries: list[Any] = sorted(profile.getstats(), key=lambda entry: -entry.inlinetime)
    waits = [entry for entry in entries if any(word in str(entry.code) for word in WAITS)]
    return [entry for entry in entries if entry not in waits], sum(w.inlinetime for w in waits)


def _function(entry: Any) -> str:
    code = entry.code
    if isinstance(code, str):
        return code.strip("<>")
    return f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_qualname}"


def profile_controller(workload: Workload, direction: str) -> None:
    """Print the time by function, on each thread of a controller with checksums."""
    with ThreadProfiles() as profiles:
        method = Controller(workload, "xxh3")
        turn = TransferRun(method, direction)
        for number in range(PROFILED_TURNS):
            turn.prepare(number)
            with profiles.watched():
                turn.run()
            turn.check()
        method.close()
    title = f"{direction}, {size_text(workload.page_nbytes)}, with checksums, while watched"
    console.print(profiles.table(title, PROFILED_TURNS * workload.pages))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__, page_sizes=PAGES, multiple=8)
    parser.add_argument("--profile", action="store_true", help="print where the time goes instead")
    options = parser.parsed(arguments)
    report = Report.begin(distributions=["numpy", "xxhash"])
    for page_nbytes in options.sizes:
        workload = Workload(page_nbytes, PAGES.get(page_nbytes) or 256 * MIB // page_nbytes)
        for direction, make_ready in (
            ("L3 → L2", workload.fill_storage),
            ("L2 → L3", workload.fill_hosts),
        ):
            make_ready()
            if options.profile:
                profile_controller(workload, direction)
                continue
            compared = methods(workload)
            measure(
                report, workload, compared, direction, options.rounds or ROUNDS.get(page_nbytes, 7)
            )
            for method in compared:
                method.close()
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
