"""The figures of a replay: counted while it runs, then as JSON under stable names and as a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.table import Table


_DROPPED = "dropped"
_REASONS = {
    _DROPPED: "dropped from the write queue",
    "refused": "refused by the storage",
    "unavailable": "storage unavailable",
    "timeout": "timed out",
    "breaker_open": "not tried, the breaker was open",
    "error": "failed with an error",
}
_COUNTED = ("blocks", "pages", "tokens")
_PLACES = {
    "L2": ("l2_hits",),
    "L3": ("l3_hits",),
    "nowhere": ("misses",),
    "all": ("total",),
    "L2 + L3": ("l2_hits", "l3_hits"),
}


@dataclass(slots=True)
class Tiers:
    """How many of something were found where."""

    l2: int = 0
    l3: int = 0
    miss: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.l2 + self.l3 + self.miss

    def figures(self, unit: int = 1) -> dict[str, Any]:
        """The counts times `unit`, and the share that was found."""
        return {
            "total": self.total * unit,
            "l2_hits": self.l2 * unit,
            "l3_hits": self.l3 * unit,
            "misses": self.miss * unit,
            "hit_rate": _share(self.l2 + self.l3, self.total),
        }


@dataclass(slots=True)
class Tally:
    """What the requests of a run met."""

    requests: int = 0
    blocks: Tiers = field(default_factory=Tiers)
    """A block is found where all of its pages are, and in L3 where one of them came from there."""
    pages: Tiers = field(default_factory=Tiers)
    ideal_block_hits: int = 0
    paired_pages: int = 0
    """Found pages that were proved in every pool: target and draft."""
    corrupt_pages: int = 0
    """Pages, each pool's for itself, that were handed out with other bytes than had been written."""
    verified_nbytes: int = 0
    unreserved_pages: int = 0
    """Computed pages that L2 had no room for."""
    prefetch_s: list[float] = field(default_factory=list[float])
    """From each request's call to its lease."""

    def place(self, pages: int, found: int, loaded: Sequence[int], pages_per_block: int) -> None:
        """Count a prompt of `pages`, of which `found` were usable and `loaded` came from L3."""
        self.requests += 1
        self.pages.l2 += found - len(loaded)
        self.pages.l3 += len(loaded)
        self.pages.miss += pages - found
        whole = found // pages_per_block
        from_l3 = len({page // pages_per_block for page in loaded} & set(range(whole)))
        self.blocks.l2 += whole - from_l3
        self.blocks.l3 += from_l3
        self.blocks.miss += pages // pages_per_block - whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Pages that moved in one direction between L2 and L3, checksums included."""

    nbytes: int
    busy_s: float
    """Time during which at least one call was running."""

    def figures(self) -> dict[str, Any]:
        """With the bandwidth while busy; null where nothing moved."""
        rate = self.nbytes / self.busy_s / 1e9 if self.nbytes and self.busy_s else None
        return {**asdict(self), "gb_per_s": rate}


def figures(
    tally: Tally,
    *,
    page_tokens: int,
    read: Flow,
    write: Flow,
    controller: Mapping[str, int],
    store: Mapping[str, int],
    storage: Mapping[str, int],
    unsaved: Sequence[Mapping[str, int]] = (),
    drained: bool = True,
) -> dict[str, Any]:
    """Return everything that was counted, ready for JSON. Names are stable."""
    blocks = tally.blocks.figures()
    ideal = {
        "ideal_hits": tally.ideal_block_hits,
        "ideal_hit_rate": _share(tally.ideal_block_hits, tally.blocks.total),
    }
    return {
        "requests": tally.requests,
        "blocks": {**blocks, **ideal},
        "pages": tally.pages.figures(),
        "tokens": tally.pages.figures(page_tokens),
        "paired_pages": tally.paired_pages,
        "l3_read": read.figures(),
        "l3_write": write.figures(),
        "prefetch": {
            "p50_s": percentile(tally.prefetch_s, 50),
            "p99_s": percentile(tally.prefetch_s, 99),
        },
        "loaded_unused_pages": controller.get("loaded_unused_pages", 0),
        "dropped_write_pages": controller.get("dropped_pages", 0),
        "unsaved_pages": unsaved_pages(controller.get("dropped_pages", 0), unsaved),
        "drained": drained,
        "unreserved_pages": tally.unreserved_pages,
        "verified_nbytes": tally.verified_nbytes,
        "corrupt_pages": tally.corrupt_pages,
        "controller": dict(sorted(controller.items())),
        "store": dict(sorted(store.items())),
        "storage": dict(sorted(storage.items())),
    }


def unsaved_pages(dropped: int, unsaved: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the pages that were to be stored and were not, by reason, with their `total`.

    The pages of all pools count as one. One that is offered again and fails again counts again.
    """
    reasons: Counter[str] = Counter()
    for each in unsaved:
        reasons.update(each)
    reasons[_DROPPED] += dropped
    told = {reason: pages for reason, pages in sorted(reasons.items()) if pages}
    return {"total": sum(told.values()), **told}


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The smallest value that `percent` % of them do not exceed; None where there are none."""
    if not values:
        return None
    rank = max(1, -(-len(values) * percent // 100))
    return sorted(values)[rank - 1]


def tables(report: Mapping[str, Any]) -> list[Table]:
    """A run's report for people: where pages were found, and then everything else."""
    from rich import box  # noqa: PLC0415 - JSON alone does without it
    from rich.table import Table  # noqa: PLC0415

    tiers = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    tiers.add_column("found in", no_wrap=True)
    for what in (*_COUNTED, "of blocks"):
        tiers.add_column(what, justify="right", no_wrap=True)
    for row in _tier_rows(report):
        tiers.add_row(*row)
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in _facts(report):
        facts.add_row(name, text)
    return [tiers, facts]


def _tier_rows(report: Mapping[str, Any]) -> Iterator[list[str]]:
    blocks = report["blocks"]
    for label, names in _PLACES.items():
        counts = [sum(report[what][name] for name in names) for what in _COUNTED]
        share = _share(counts[0], blocks["total"])
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
        yield "draft pages paired", f"{report['paired_pages']:,} of {found:,} pages found"
    for name, label in (("l3_read", "L3 read"), ("l3_write", "L3 write")):
        flow = report[name]
        rate = f", {flow['gb_per_s']:.2f} GB/s while busy" if flow["gb_per_s"] else ""
        yield label, f"{_gigabytes(flow['nbytes'])}{rate}"
    if prefetch["p50_s"] is not None:
        times = (f"{name} {1e3 * prefetch[f'{name}_s']:.2f} ms" for name in ("p50", "p99"))
        yield "prefetch", ", ".join(times)
    yield "loaded but unused", f"{report['loaded_unused_pages']:,} pages"
    yield "writes dropped", _unsaved_told(report["unsaved_pages"])
    if not report["drained"]:
        yield (
            "writes unfinished",
            "the storage took too long: the last of them are in no figure here",
        )
    if report["unreserved_pages"]:
        yield "no room in L2", f"{report['unreserved_pages']:,} pages"
    verified = _gigabytes(report["verified_nbytes"])
    yield "corrupt pages", f"{report['corrupt_pages']:,}; {verified} verified"
    yield from (("note", note) for note in report.get("notes", ()))
    yield from _troubles(report)
    for name in ("controller", "store", "storage"):
        if counters := _counters(report[name]):
            yield f"{name} counters", counters


def _unsaved_told(unsaved: Mapping[str, int]) -> str:
    total = f"{unsaved['total']:,} pages"
    told = [
        f"{pages:,} {_REASONS.get(reason, reason)}"
        for reason, pages in unsaved.items()
        if reason != "total"
    ]
    return f"{total}: {', '.join(told)}" if told else total


def _troubles(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    faults, swap = report.get("faults"), report.get("swap")
    if faults is not None:
        yield "faults", _counters(faults["struck"]) or "none has happened"
    if swap is not None:
        yield "swap", _swap_told(swap)
        for name in ("store", "storage"):
            if counters := _counters(swap[name]):
                yield f"next {name} counters", counters


def _swap_told(swap: Mapping[str, Any]) -> str:
    if not swap["begun"]:
        return f"to {swap['backend']} was not begun"
    told = f"to {swap['backend']} after {swap['after_requests']:,} requests, {swap['took_s']:.2f} s"
    undone = "; pages for the first storage were lost, or calls of it still ran"
    left = "" if swap["drained"] else undone
    failed = "" if swap["attached"] else f"; L2 alone since then: {swap['complaint']}"
    return f"{told}{left}{failed}"


def _counters(counters: Mapping[str, int]) -> str:
    return ", ".join(f"{key} {count:,}" for key, count in counters.items() if count)


def _run_facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    replayed = f"{report['requests']:,} of {report['trace_requests']:,}"
    stopped = ", then interrupted" if report["interrupted"] else ""
    yield "requests", f"{replayed} in {report['elapsed_s']:.1f} s{stopped}"
    each = "" if report.get("ranks") is None else ", on each rank"
    for pool in report["pools"]:
        page = f"{pool['page_nbytes']:,} bytes a page of {report['page_tokens']} tokens{each}"
        yield f"pool {pool['name']}", f"{pool['shape']}: {page}"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
