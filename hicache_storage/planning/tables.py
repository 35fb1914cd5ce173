"""Show a plan as tables, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_storage.planning.wording import (
    amount,
    duration,
    option_name,
    percent,
    size,
)
from hicache_storage.scalars import counted, unit_of
from hicache_storage.text_tables import fact_table, text_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.table import Table

HIT_TITLES = ("L2", "L3", "hits", "in L2", "in L3", "target alone")
TIER_TITLES = ("L2", "tier", "size", "serves", "hits so far")
BANDWIDTH_TITLES = ("L2", "L3", "read", "60 s", "1 s", "write", "60 s", "1 s", "unread")
MONEY_TITLES = ("L2", "L3", "tokens saved", "GPU hours", "GPUs", "cost/month", "net/month")


def tables(report: Mapping[str, Any]) -> list[Table | str]:
    """Return the tables of hits, bandwidth and money, then the facts."""
    options: Sequence[Mapping[str, Any]] = report["options"]
    stored = [option for option in options if option["storage_nbytes"]]
    parts: list[Table | str] = [
        text_table(HIT_TITLES, [hit_row(option) for option in options], "R", best=report["best"])
    ]
    if tiers := report.get("tiers"):
        parts.append(text_table(TIER_TITLES, [tier_row(tier) for tier in tiers], "rlR"))
    if stored:
        unit_nbytes, _ = bandwidth_unit(report)
        rows = [bandwidth_row(option, unit_nbytes) for option in stored]
        parts.append(text_table(BANDWIDTH_TITLES, rows, "R"))
    if options[0]["gpu_seconds"] is not None:
        parts.append(
            text_table(
                MONEY_TITLES, [money_row(option) for option in options], "R", best=report["best"]
            )
        )
    return [*parts, fact_table(facts(report))]


def facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each fact about the trace and the plan."""
    blocks = report["blocks"]
    yield "trace", f"{counted(report['requests'], 'request')} in {duration(report['duration_s'])}"
    distinct = f"{blocks['distinct']:,} are different ({size(report['distinct_nbytes'])} in L3)"
    longest = f"the longest prompt has {blocks['longest_prompt']:,}"
    yield "blocks", f"{blocks['total']:,}, of which {distinct}; {longest}"
    yield "infinite cache", f"{percent(report['ideal_hit_rate'])} of blocks"
    for pool in report["pools"]:
        page = f"{size(pool['page_nbytes'])} a page of {report['page_tokens']} tokens"
        yield (
            f"pool {pool['name']}",
            f"{pool['shape']}: {page}, {size(pool['distinct_nbytes'])} in all",
        )
    for share, nbytes in report["l2_for_share_of_ideal"].items():
        if nbytes is not None:
            yield f"{float(share):.0%} of that", f"an L2 of {size(nbytes)} without L3"
    yield "write policy", report["write_policy"]
    if any(option["storage_nbytes"] for option in report["options"]):
        unit = bandwidth_unit(report)[1]
        windows = "mean, then the 99th percentile of windows of 60 s and of 1 s"
        yield "read, write", f"{unit}/s of L3: {windows}"
        yield "unread", "share of the pages written to L3 that are not read before the trace ends"
    if report["sample"] is not None:
        worst = max(option["error"] for option in report["options"])
        yield "sample", f"{percent(report['sample']['rate'])} of blocks: hits ± {percent(worst)}"
    if report["best"] is not None:
        yield "best", option_name(report["options"][report["best"]])
    yield from (("note", note) for note in report["notes"])


def hit_row(option: Mapping[str, Any]) -> list[str]:
    """Return the table row of an option, with the columns `HIT_TITLES`."""
    shares = [percent(option[f"{tier}hit_rate"]) for tier in ("", "l2_", "l3_")]
    alone = option.get("target_alone")
    return [*_sizes(option), *shares, percent(alone["hit_rate"]) if alone else ""]


def tier_row(tier: Mapping[str, Any]) -> list[str]:
    """Return the table row of one tier of L3, with the columns `TIER_TITLES`."""
    shares = [percent(tier["hit_rate"]), percent(tier["hit_rate_so_far"])]
    return [size(tier["host_nbytes"]), tier["name"], size(tier["nbytes"]), *shares]


def bandwidth_unit(report: Mapping[str, Any]) -> tuple[int, str]:
    """Return one unit for all bandwidths of a plan, chosen for the highest."""
    return unit_of(max(each for option in report["options"] for each in _bandwidths(option)))


def bandwidth_row(option: Mapping[str, Any], unit_nbytes: int) -> list[str]:
    """Return the table row of an option, with the columns `BANDWIDTH_TITLES`, in the given unit."""
    written = option["written_pages"]
    return [
        *_sizes(option),
        *(f"{each / unit_nbytes:.2f}" for each in _bandwidths(option)),
        f"{option['unread_pages'] / written:.0%}" if written else "",
    ]


def money_row(option: Mapping[str, Any]) -> list[str]:
    """Return the table row of an option, with the columns `MONEY_TITLES`."""
    return [
        *_sizes(option),
        f"{option['saved_tokens'] / 1e6:,.1f} M",
        f"{option['gpu_seconds'] / 3600:,.1f}",
        f"{option['gpus']:.1f}",
        amount(option["cost_per_month"]),
        amount(option["net_per_month"]),
    ]


def _bandwidths(option: Mapping[str, Any]) -> list[float]:
    names = ("mean_bytes_per_s", "p99_60s_bytes_per_s", "p99_1s_bytes_per_s")
    return [option[figures][name] for figures in ("l3_read", "l3_write") for name in names]


def _sizes(option: Mapping[str, Any]) -> list[str]:
    return [size(option["host_nbytes"]), size(option["storage_nbytes"])]
