"""Show the figures of a run as tables and lines of 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_storage.cli.operations.bench.comparison import CPU, METRICS, ratios_to_first_part
from hicache_storage.cli.sizes import counted, format_nbytes
from hicache_storage.text_tables import text_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.table import Table

    from hicache_storage.cli.operations.bench.comparison import Cell

TITLES = ("operation", "calls", "p50", "p99", "p99.9", "MiB/s", "pages/s", "missed", "failed")
_MIB = 1 << 20
_GIB = 1 << 30
_SUCCESSES = ("ok", "miss")


def tables(report: Mapping[str, Any], cells: Sequence[Cell]) -> Iterator[Table | str]:
    """Yield the figures of each load, the ratios to an earlier run, and the problems."""
    for load in report["loads"]:
        yield title_of(load)
        yield text_table(TITLES, operation_rows(load), "lr", tight=True)
    if alone := report.get("first_part"):
        for load in alone["loads"]:
            yield f"{alone['name']} alone: {title_of(load)}"
            yield text_table(TITLES, operation_rows(load), "lr", tight=True)
    if ratios := ratios_to_first_part(report):
        yield f"Ratios of the whole store to {report['first_part']['name']} alone:"
        yield text_table(RATIO_TITLES, ratio_rows(ratios), "lr", tight=True)
    if cells:
        yield "Ratios to the earlier run (! marks figures that are worse than tolerated):"
        yield text_table(RATIO_TITLES, ratio_rows(cells), "lr", tight=True)
    if report["interrupted"]:
        yield "Interrupted: the figures cover the time until then."
    yield from (f"! {problem}" for problem in report["problems"])


def title_of(load: Mapping[str, Any]) -> str:
    """Return the title of a load, with its total figures: `1 MiB pages, 4 threads: 1.20 GiB/s, ...`."""
    cpu = load["cpu_s_per_gb"]
    pages, threads = format_nbytes(load["page_nbytes"]), thread_name(load["threads"])
    return (
        f"{pages} pages, {threads}, {load['elapsed_s']:.1f} s:"
        f" {format_nbytes(load['bytes_per_s'])}/s"
        f"{'' if cpu is None else f', {cpu * _GIB / 1e9:.2f} CPU s/GiB'}"
    )


def thread_name(threads: int) -> str:
    """Write a number of threads in words."""
    return counted(threads, "thread")


def operation_rows(load: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a table row for each operation, with the columns `TITLES`."""
    return [
        (
            operation,
            f"{figures['calls']:,}",
            *(format_seconds(figures[name]) for name in ("p50_s", "p99_s", "p999_s")),
            f"{figures['bytes_per_s'] / _MIB:,.1f}" if figures["bytes_per_s"] else "",
            f"{figures['pages_per_s']:,.0f}",
            f"{figures['verdicts'].get('miss', 0):,}",
            f"{sum(n for name, n in figures['verdicts'].items() if name not in _SUCCESSES):,}",
        )
        for operation, figures in load["operations"].items()
    ]


RATIO_TITLES = ("pages", "threads", "operation", *METRICS, CPU)


def ratio_rows(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """Return a table row for each operation, and one for `all`, with the columns `RATIO_TITLES`."""
    rows: dict[tuple[int, int, str], dict[str, str]] = {}
    for cell in cells:
        key = cell.page_nbytes, cell.threads, cell.operation or "all"
        ratio = "none" if cell.ratio is None else f"{cell.ratio:.2f}"
        rows.setdefault(key, {})[cell.metric] = f"{'!' if cell.worse else ''}{ratio}"
    return [
        (
            format_nbytes(nbytes),
            str(threads),
            operation,
            *(row.get(name, "") for name in (*METRICS, CPU)),
        )
        for (nbytes, threads, operation), row in rows.items()
    ]


def format_seconds(seconds: float | None) -> str:
    """Format a latency with three digits: `0.21 ms`, `1.20 s`."""
    if seconds is None:
        return ""
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1000, "ms")
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"
