"""Write a run of `hicache bench` as one self-contained HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_storage.cli.operations.bench.comparison import ratios_to_first_part
from hicache_storage.cli.operations.bench.tables import (
    RATIO_TITLES,
    TITLES,
    format_seconds,
    operation_rows,
    ratio_rows,
    thread_name,
    title_of,
)
from hicache_storage.cli.sizes import counted, format_nbytes
from hicache_storage.planning.charts import Axis, Line, bandwidth_axis, line_chart, linear_axis
from hicache_storage.report_page import fact_list, figures, hero, report_page, section

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from xml.etree.ElementTree import Element

    from hicache_storage.cli.operations.bench.comparison import Cell

_LEAST_POINTS = 2


def html_page(report: Mapping[str, Any], cells: Sequence[Cell]) -> str:
    """Return the whole page. It loads nothing from a file or the network."""
    return report_page(
        title=f"Load on {report['backend']}",
        hero=hero(
            eyebrow="Load · HiCache storage",
            title=f"Load on {report['backend']}",
            lead=_lead(report),
            notes=report["problems"],
        ),
        sections=[
            *(_load_section(number, load) for number, load in enumerate(report["loads"])),
            *_first_part_sections(report),
            *([_ratio_section(cells)] if cells else []),
            section("settings", "The load", None, fact_list(_facts(report))),
        ],
        footer="Made by hicache bench. Latencies are those of whole calls, measured on this machine.",
    )


def _lead(report: Mapping[str, Any]) -> str:
    if not report["loads"]:
        return "Nothing was measured."
    best = max(report["loads"], key=lambda load: load["bytes_per_s"])
    found = len(report["problems"])
    were = "was" if found == 1 else "were"
    problems = f"{counted(found, 'problem')} {were} found." if found else "No problem was found."
    return (
        f"At most {format_nbytes(best['bytes_per_s'])}/s, with {format_nbytes(best['page_nbytes'])}"
        f" pages and {thread_name(best['threads'])}. {problems}"
    )


def _load_section(number: int, load: Mapping[str, Any]) -> Element:
    return section(
        f"load-{number}",
        f"{format_nbytes(load['page_nbytes'])} pages, {thread_name(load['threads'])}",
        title_of(load),
        figures(TITLES, operation_rows(load)),
        _latency_chart(load),
        _bandwidth_chart(load),
        _slowest_chart(load),
    )


def _latency_chart(load: Mapping[str, Any]) -> Element | None:
    """Return the latencies by percentile. The axis gives the slowest calls more room."""
    lines = [
        Line(operation, [(one_in, seconds * 1000) for one_in, seconds in figures["curve"]])
        for operation, figures in load["operations"].items()
        if len(figures["curve"]) >= _LEAST_POINTS
    ]
    if not lines:
        return None
    x = Axis(
        title="percentile of calls",
        ticks=[1, 2, 10, 100, 1000],
        text=lambda one_in: f"{100 - 100 / one_in:g}",
        low=1,
        high=1000,
        logarithmic=True,
    )
    most = max(point[1] for line in lines for point in line.points)
    y = linear_axis("latency", most, lambda value: format_seconds(value / 1000))
    return line_chart("Latency by percentile", lines, x, y)


def _bandwidth_chart(load: Mapping[str, Any]) -> Element | None:
    """Return the bytes moved in each second of the load."""
    lines = [
        Line(operation, figures["series"])
        for operation, figures in load["operations"].items()
        if figures["bytes_per_s"] and len(figures["series"]) >= _LEAST_POINTS
    ]
    if not lines:
        return None
    points = [point for line in lines for point in line.points]
    x = linear_axis("seconds", max(point[0] for point in points), lambda value: f"{value:g}")
    y = bandwidth_axis(max(point[1] for point in points))
    return line_chart("Bandwidth over time", lines, x, y)


def _slowest_chart(load: Mapping[str, Any]) -> Element | None:
    """Return the slowest call in each second of the load. A stall of the store is a peak."""
    lines = [
        Line(operation, [(second, slowest_s * 1000) for second, slowest_s in series])
        for operation, figures in load["operations"].items()
        if len(series := figures["slowest_s_series"]) >= _LEAST_POINTS
    ]
    if not lines:
        return None
    points = [point for line in lines for point in line.points]
    x = linear_axis("seconds", max(point[0] for point in points), lambda value: f"{value:g}")
    y = linear_axis(
        "latency", max(point[1] for point in points), lambda value: format_seconds(value / 1000)
    )
    return line_chart("Slowest call over time", lines, x, y)


def _first_part_sections(report: Mapping[str, Any]) -> Iterator[Element]:
    """Yield what a composed store costs: its first part's figures, and the ratios to them."""
    alone = report.get("first_part")
    for number, load in enumerate(alone["loads"] if alone else ()):
        yield section(
            f"alone-{number}",
            f"{report['first_part']['name']} alone",
            title_of(load),
            figures(TITLES, operation_rows(load)),
        )
    if ratios := ratios_to_first_part(report):
        name = report["first_part"]["name"]
        yield section(
            "composition",
            f"Ratios to {name} alone",
            f"Each figure of the whole store divided by that of {name} alone, in the same run.",
            figures(RATIO_TITLES, ratio_rows(ratios)),
        )


def _ratio_section(cells: Sequence[Cell]) -> Element:
    return section(
        "ratios",
        "Ratios to the earlier run",
        "Each figure of this run divided by that of the earlier run. A ! marks figures that are"
        " worse than tolerated.",
        figures(RATIO_TITLES, ratio_rows(cells)),
    )


def _facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    settings = report["settings"]
    rate = settings["rate_pages_per_s"]
    weights = ", ".join(f"{name} {weight:g}" for name, weight in settings["mix"].items())
    return [
        ("mix", weights),
        ("pages in a call", str(settings["batch_pages"])),
        ("rate", "as fast as possible" if rate is None else f"at most {rate:,} pages/s"),
        ("working set", format_nbytes(settings["working_set_nbytes"])),
        ("deadline of a call", f"{settings['timeout_s']:g} s"),
        ("data plane", report["data_plane"]),
        ("interrupted", "yes" if report["interrupted"] else "no"),
    ]
