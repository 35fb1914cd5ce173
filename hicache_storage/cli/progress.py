"""Progress on a terminal: pages, bytes, bytes a second and the time left."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from hicache_storage.scalars import counted, format_nbytes

if TYPE_CHECKING:
    from collections.abc import Generator

    from rich.progress import Progress, TaskID


class Meter(Protocol):
    """The receiver of progress. `wants_total` is False where nobody would see it."""

    wants_total: bool

    def begin(self, nbytes: int | None) -> None:
        """Announce the bytes of the work, or None if they are unknown."""

    def advance(self, pages: int, nbytes: int) -> None:
        """Add work that is done."""


class NoMeter:
    """A meter that shows nothing."""

    wants_total = False

    def begin(self, nbytes: int | None) -> None:
        pass

    def advance(self, pages: int, nbytes: int) -> None:
        pass


@contextmanager
def meter(title: str, duration_s: float | None = None) -> Generator[Meter, None, None]:
    """Show a progress bar on stderr if that is a terminal.

    With `duration_s` the bar shows the share of that time instead of the share of the bytes.
    """
    from rich.console import Console  # noqa: PLC0415 - `--help` stays fast

    console = Console(stderr=True)
    if not console.is_terminal:
        yield NoMeter()
        return
    from rich import progress  # noqa: PLC0415

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=None),
        progress.TextColumn("{task.fields[moved]}"),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=duration_s, moved="")
        yield _TimeMeter(bar, task) if duration_s else _BarMeter(bar, task)


class _TimeMeter:
    """A meter on a bar of rich that shows the time that has passed."""

    wants_total = False

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task
        self._pages = 0
        self._began_s = time.monotonic()

    def begin(self, nbytes: int | None) -> None:
        pass

    def advance(self, pages: int, nbytes: int) -> None:  # noqa: ARG002 - the interface of a meter
        self._pages += pages
        passed_s = time.monotonic() - self._began_s
        self._bar.update(self._task, completed=passed_s, moved=counted(self._pages, "page"))


class _BarMeter:
    """A meter on a bar of rich."""

    wants_total = True

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task
        self._pages = 0
        self._nbytes = 0
        self._total = ""

    def begin(self, nbytes: int | None) -> None:
        self._total = "" if nbytes is None else f" of {format_nbytes(nbytes)}"
        self._bar.update(self._task, total=nbytes)

    def advance(self, pages: int, nbytes: int) -> None:
        self._pages += pages
        self._nbytes += nbytes
        moved = counted(self._pages, "page")
        if self._nbytes or self._total:  # a listing moves none
            moved += f", {format_nbytes(self._nbytes)}{self._total}"
        speed = self._bar.tasks[self._task].speed
        if speed:
            moved += f", {format_nbytes(speed)}/s"
        self._bar.update(self._task, advance=nbytes, moved=moved)
