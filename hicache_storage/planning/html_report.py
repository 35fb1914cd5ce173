"""Write a plan as one self-contained HTML page: a summary, plots and tables."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from hicache_storage.planning.charts import Line, bandwidth_axis, line_chart, linear_axis, size_axis
from hicache_storage.planning.tables import (
    BANDWIDTH_TITLES,
    HIT_TITLES,
    MONEY_TITLES,
    TIER_TITLES,
    bandwidth_row,
    bandwidth_unit,
    facts,
    hit_row,
    money_row,
    tier_row,
)
from hicache_storage.planning.wording import amount, option_name, percent, size
from hicache_storage.report_page import fact_list, figures, hero, report_page, section

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from xml.etree.ElementTree import Element


def html_page(report: Mapping[str, Any]) -> str:
    """Return the whole page. It loads nothing, and its policy forbids browsers to load anything."""
    name = PurePath(report["trace"]).name
    return report_page(
        title=f"Capacity plan for {name}",
        hero=hero(
            eyebrow="Capacity plan · HiCache storage",
            title=f"{name}, {report['model']}",
            lead=_lead(report),
            notes=report["notes"],
        ),
        sections=[one for one in _sections(report) if one is not None],
        footer=_footer(report),
    )


def _lead(report: Mapping[str, Any]) -> str:
    """Summarize the plan in one or two sentences."""
    ideal = f"A cache that never evicts hits {percent(report['ideal_hit_rate'])} of the blocks."
    if report["best"] is None:
        most = max(report["options"], key=lambda option: option["hit_rate"])
        return f"{ideal} An {option_name(most)} hit {percent(most['hit_rate'])}."
    best = report["options"][report["best"]]
    return (
        f"{ideal} Of the sizes compared, an {option_name(best)} pay most: they hit"
        f" {percent(best['hit_rate'])}, save the work of {best['gpus']:.1f} GPUs, and are worth"
        f" {amount(best['net_per_month'])} a month after their cost."
    )


def _sections(report: Mapping[str, Any]) -> list[Element | None]:
    options: Sequence[Mapping[str, Any]] = report["options"]
    stored = [option for option in options if option["storage_nbytes"]]
    return [
        section(
            "hits",
            "Hits of the sizes compared",
            "Shares of the prompts' blocks. The last column is for the same bytes without a draft.",
            figures(HIT_TITLES, [hit_row(option) for option in options], best=report["best"]),
        ),
        section(
            "l2",
            "Hits of every L2 without L3",
            "Exact LRU stack distances, all capacities at once.",
            _size_chart("Hit rate by size of L2", "L2", [Line("L2 alone", report["l2_curve"])]),
        ),
        section(
            "l3",
            "Hits of every L3",
            "L2 and L3 together. L3 sees only what L2 lacks, so each L2 has a line of its own.",
            _size_chart(
                "Hit rate by size of L3",
                "L3",
                [
                    Line(f"behind {size(curve['host_nbytes'])} of L2", curve["points"])
                    for curve in report["l3_curves"]
                ],
            ),
        ),
        section(
            "tiers",
            "Tiers of L3",
            "The share of blocks that each tier serves, and the hits of L2 and the tiers so far.",
            figures(TIER_TITLES, [tier_row(tier) for tier in report["tiers"]]),
        )
        if "tiers" in report
        else None,
        _bandwidth_section(report, stored) if stored else None,
        section(
            "money",
            "Money",
            "GPU time is the time that the saved prompt tokens would take. A month has the busy"
            " hours that were given.",
            figures(MONEY_TITLES, [money_row(option) for option in options], best=report["best"]),
        )
        if options[0]["gpu_seconds"] is not None
        else None,
        section(
            "trace",
            "The trace",
            None,
            fact_list([one for one in facts(report) if one[0] != "note"]),
        ),
    ]


def _bandwidth_section(report: Mapping[str, Any], stored: Sequence[Mapping[str, Any]]) -> Element:
    best = report["best"]
    shown = report["options"][best] if best is not None else stored[-1]
    shown = shown if shown["storage_nbytes"] else stored[-1]
    unit_nbytes, unit = bandwidth_unit(report)
    return section(
        "bandwidth",
        "Bandwidth of L3",
        f"{unit}/s by the arrival of the requests, all pools together: the mean, then the 99th"
        " percentile of all windows of 60 s and of 1 s. Unread is the share of written pages that are"
        " not read later."
        f" The plot shows windows of {_window_s(shown):g} s of an {option_name(shown)}.",
        _series_chart(shown),
        figures(BANDWIDTH_TITLES, [bandwidth_row(option, unit_nbytes) for option in stored]),
    )


def _window_s(option: Mapping[str, Any]) -> float:
    starts = [start_s for start_s, _ in option["read_series"][:2]]
    return starts[-1] or 60


def _size_chart(title: str, tier: str, lines: Sequence[Line]) -> Element:
    points = [point for line in lines for point in line.points]
    x = size_axis(f"size of {tier}", points[0][0], points[-1][0], size)
    y = linear_axis("hit rate", max(point[1] for point in points), percent)
    return line_chart(title, lines, x, y)


def _series_chart(option: Mapping[str, Any]) -> Element:
    lines = [
        Line("read from L3", option["read_series"]),
        Line("written to L3", option["write_series"]),
    ]
    points = [point for line in lines for point in line.points]
    x = linear_axis("minutes", points[-1][0] / 60, lambda value: f"{value:g}")
    scaled = [
        Line(line.name, [(point[0] / 60, point[1]) for point in line.points]) for line in lines
    ]
    y = bandwidth_axis(max(point[1] for point in points))
    return line_chart("Bandwidth over time", scaled, x, y)


def _footer(report: Mapping[str, Any]) -> str:
    sample = report["sample"]
    method = "every block" if sample is None else f"{percent(sample['rate'])} of the blocks"
    return (
        f"Made by hicache plan from {method} of the trace. The pages of L2 and L3 are those of the whole"
        " model, on all of its ranks together."
    )
