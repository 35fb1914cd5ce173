"""Show a replay's report as tables, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_storage.replay.report import ratio
from hicache_storage.scalars import counted, format_nbytes
from hicache_storage.text_tables import fact_table, text_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.table import Table

_REASONS = {
    "dropped": "dropped from the write queue",
    "refused": "refused by the storage",
    "unavailable": "storage unavailable",
    "timeout": "timed out",
    "breaker_open": "not tried, the breaker was open",
    "error": "failed with an error",
}
_COUNTED = ("blocks", "pages", "tokens")
_TIERS = {
    "L2": ("l2_hits",),
    "L3": ("l3_hits",),
    "nowhere": ("misses",),
    "all": ("total",),
    "L2 + L3": ("l2_hits", "l3_hits"),
}


def tables(report: Mapping[str, Any]) -> list[Table]:
    """Return the two tables of a report: hits by tier, and everything else."""
    titles = ("found in", *_COUNTED, "of blocks")
    return [text_table(titles, _tier_rows(report), "lr"), fact_table(_facts(report))]


def _tier_rows(report: Mapping[str, Any]) -> Iterator[list[str]]:
    blocks = report["blocks"]
    for label, names in _TIERS.items():
        counts = [sum(report[unit][name] for name in names) for unit in _COUNTED]
        share = ratio(counts[0], blocks["total"])
        yield [label, *(f"{count:,}" for count in counts), _percent(share)]
    yield [
        "infinite cache",
        f"{blocks['ideal_hits']:,}",
        "",
        "",
        _percent(blocks["ideal_hit_rate"]),
    ]


def _facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from _run_facts(report)
    prefetch = report["prefetch"]
    if report.get("ranks") is not None:
        written = ", ".join(f"{pages:,}" for pages in report["ranks"]["written_pages"])
        yield "ranks", f"{report['ranks']['size']} processes; wrote {written} pages"
    if len(report["pools"]) > 1:
        found = report["pages"]["l2_hits"] + report["pages"]["l3_hits"]
        yield "draft pages paired", f"{report['paired_pages']:,} of {counted(found, 'page')} found"
    for name, label in (("l3_read", "L3 read"), ("l3_write", "L3 write")):
        throughput = report[name]
        rate = throughput["gb_per_s"]
        bandwidth = f", {format_nbytes(rate * 1e9)}/s while busy" if rate else ""
        yield label, f"{format_nbytes(throughput['nbytes'])}{bandwidth}"
    if prefetch["p50_s"] is not None:
        times = (f"{name} {1e3 * prefetch[f'{name}_s']:.2f} ms" for name in ("p50", "p99"))
        yield "prefetch", ", ".join(times)
    yield "loaded but unused", counted(report["loaded_unused_pages"], "page")
    yield "writes dropped", _unsaved_text(report["unsaved_pages"])
    if not report["drained"]:
        yield "writes unfinished", _unfinished_text(report["unsaved_pages"])
    if report["unreserved_pages"]:
        yield "no room in L2", counted(report["unreserved_pages"], "page")
    yield from _left_pages(report)
    verified = format_nbytes(report["verified_nbytes"])
    yield "corrupt pages", f"{report['corrupt_pages']:,}; {verified} verified"
    yield from (("note", note) for note in report.get("notes", ()))
    yield from _disruptions(report)
    for name in ("controller", "store", "storage"):
        if counters := _counters(report[name]):
            yield f"{name} counters", counters


def _left_pages(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    left = report["left_pages"]
    if left is None:
        yield "pages kept", "they stay in the storage (--keep)"
    elif left:
        yield "pages left", f"{left:,} could not be removed from the storage: use hicache gc"


def _unsaved_text(unsaved: Mapping[str, int]) -> str:
    total = counted(unsaved["total"], "page")
    by_reason = [
        f"{pages:,} {_REASONS.get(reason, reason)}"
        for reason, pages in unsaved.items()
        if reason != "total"
    ]
    return f"{total}: {', '.join(by_reason)}" if by_reason else total


def _unfinished_text(unsaved: Mapping[str, int]) -> str:
    if unsaved.keys() - {"total", "dropped"}:
        return "the storage did not take all of the last pages, for the reasons above"
    return "the storage took too long, so no figure includes the last writes"


def _disruptions(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    faults, swap = report.get("faults"), report.get("swap")
    if faults is not None:
        yield "faults", _counters(faults["struck"]) or "none"
    if swap is not None:
        yield "swap", _swap_text(swap)
        for name in ("store", "storage"):
            if counters := _counters(swap[name]):
                yield f"next {name} counters", counters


def _swap_text(swap: Mapping[str, Any]) -> str:
    if not swap["begun"]:
        return f"to {swap['backend']} did not begin"
    after = counted(swap["after_requests"], "request")
    done = f"to {swap['backend']} after {after}, {swap['took_s']:.2f} s"
    undrained = "; pages for the first storage were lost, or calls of it still ran"
    drain = "" if swap["drained"] else undrained
    failure = "" if swap["attached"] else f"; only L2 since then: {swap['complaint']}"
    return f"{done}{drain}{failure}"


def _counters(counters: Mapping[str, int]) -> str:
    return ", ".join(f"{key} {count:,}" for key, count in counters.items() if count)


def _run_facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    replayed = f"{report['requests']:,} of {report['trace_requests']:,}"
    stopped = ", then interrupted" if report["interrupted"] else ""
    yield "requests", f"{replayed} in {report['elapsed_s']:.1f} s{stopped}"
    scope = "" if report.get("ranks") is None else ", on each rank"
    if report["scale_bytes"] != 1:
        yield (
            "scale",
            (
                f"pages of {_times(report['scale_bytes'])} of their real size; use --scale-bytes"
                " 1 for pages of full size"
            ),
        )
    for pool in report["pools"]:
        page = (
            f"{format_nbytes(pool['page_nbytes'])} a page of {report['page_tokens']} tokens{scope}"
        )
        yield f"pool {pool['name']}", f"{pool['shape']}: {page}"


def _times(factor: float) -> str:
    """Format a factor below 1 as a fraction: 1/64."""
    return f"1/{1 / factor:.5g}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
