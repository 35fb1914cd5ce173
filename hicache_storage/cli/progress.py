"""Show progress on a terminal: pages, bytes, bytes per second and the time left."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache_storage.cli.stderr_log import stderr_log
from hicache_storage.scalars import counted, format_nbytes

if TYPE_CHECKING:
    from collections.abc import Generator

    from rich.progress import Progress


class Meter:
    """A receiver of progress. This base class shows nothing."""

    wants_total = False
    """True if the meter shows which share of the bytes is done."""

    def begin(self, nbytes: int | None) -> None:
        """Announce how many bytes the work has. None: unknown."""

    def advance(self, pages: int, nbytes: int) -> None:
        """Report the pages and bytes that were done since the last call."""


def shows_progress() -> bool:
    """Return whether a bar may be drawn between the messages on stderr."""
    log = stderr_log()
    return not (log.is_quiet or log.is_json)


@contextmanager
def meter(title: str, duration_s: float | None = None) -> Generator[Meter, None, None]:
    """Show a progress bar on stderr if that is a terminal, unless `--quiet` or JSON is asked for.

    With `duration_s` the bar shows the share of that time instead of the share of the bytes.
    """
    from rich.console import Console  # noqa: PLC0415 - `--help` stays fast

    console = Console(stderr=True)
    if not console.is_terminal or not shows_progress():
        yield Meter()
        return
    from rich import progress  # noqa: PLC0415

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=None),
        progress.TextColumn("{task.fields[moved]}"),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:
        yield _BarMeter(bar, title, duration_s)


class _BarMeter(Meter):
    """A meter that moves a progress bar of rich."""

    def __init__(self, bar: Progress, title: str, duration_s: float | None) -> None:
        self._bar = bar
        self._task = bar.add_task(title, total=duration_s, moved="")
        self.wants_total = not duration_s
        self._pages = self._nbytes = 0
        self._total = ""
        self._began_s = time.monotonic()

    def begin(self, nbytes: int | None) -> None:
        if self.wants_total:
            self._total = "" if nbytes is None else f" of {format_nbytes(nbytes)}"
            self._bar.update(self._task, total=nbytes)

    def advance(self, pages: int, nbytes: int) -> None:
        self._pages += pages
        moved = counted(self._pages, "page")
        if not self.wants_total:
            passed_s = time.monotonic() - self._began_s
            self._bar.update(self._task, completed=passed_s, moved=moved)
            return
        self._nbytes += nbytes
        if self._nbytes or self._total:  # a listing moves no bytes
            moved += f", {format_nbytes(self._nbytes)}{self._total}"
        speed = self._bar.tasks[self._task].speed
        if speed:
            moved += f", {format_nbytes(speed)}/s"
        self._bar.update(self._task, advance=nbytes, moved=moved)
