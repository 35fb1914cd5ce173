"""Measure what a page costs in stores of 10^3 to 10^7 pages, and what opening such a store costs.

    .venv/bin/python benchmarks/scale.py [--stores NAME,NAME] [--pages N,N] [--rounds N] [--batches N]
                                         [--batch PAGES] [--page-nbytes N] [--processes N]
                                         [--path DIRECTORY] [--json FILE]

Each store is compared with a store of the same kind that has 10^3 pages, in a place of its own. Every
operation is measured on both in turns, so that their ratio does not depend on how fast the machine is
at the moment. Pages are small, so that the cost is the cost of finding and storing a page, not of
moving its bytes.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _disk import default_parent
from _harness import Parser, console, machine_facts, markdown_head, markdown_row, names
from _scale_costs import FilledStore
from _scale_fill import Sample
from _scale_places import PLACES

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Sequence


REFERENCE_PAGES = 1000
_PATH_HELP = "for the files (default: tmpfs where there is one)"
_STORES = "redis,file,hf3fs,s3"
_PAGES = "1000,10000,100000,1000000"
_ONE_SCAN_ABOVE = 300_000
_CLEARED_REPEATEDLY = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one operation costs in a store of `pages`, compared with a store of 10^3."""

    operation: str
    pages: int
    wall_us: float
    """Microseconds per page, or for the whole if the operation does not concern pages."""
    cpu_us: float
    ratio: float | None
    """The wall time divided by the wall time in the store of 10^3 pages. None: it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """How much one run measures."""

    rounds: int
    batches: int
    """Batches in each round."""
    batch: int
    page_nbytes: int
    processes: int
    path: Path | None


def measured(name: str, pages: int, amounts: Amounts) -> Iterator[Cost]:
    """Yield the costs of a store of `pages`. The store exists as long as the iterator."""
    place = PLACES[name]
    with place(amounts.path) as here, place(amounts.path) as beside:
        sizes = {name: getattr(amounts, name) for name in ("page_nbytes", "batch", "processes")}
        reference = FilledStore(beside, REFERENCE_PAGES, **sizes)
        store = FilledStore(here, pages, **sizes)
        try:
            yield _cost("fill", store, [store.filled], [reference.filled])
            if here.nbytes is not None:
                nbytes = store.nbytes_a_page
                yield Cost(operation="bytes", pages=pages, wall_us=nbytes, cpu_us=0.0, ratio=None)
            yield from _operations(store, reference, amounts)
            if here.forget_counts is not None:
                scans = _scans(pages, amounts)
                yield _in_turns("count", scans, store, store.count, reference.count)
            cleared = [_cleared(reference) for _ in range(amounts.rounds)]
            repeated = range(amounts.rounds if pages <= _CLEARED_REPEATEDLY else 0)
            clears = [_cleared(store) for _ in repeated]
            if here.fill_capacity is not None:
                with store.at_capacity(), reference.at_capacity():
                    yield _evictions(store, reference, amounts.rounds)
            yield _cost("clear", store, clears or [store.clear()], cleared)
        finally:
            store.close()
            reference.close()


def _operations(store: FilledStore, reference: FilledStore, amounts: Amounts) -> Iterator[Cost]:
    batches = amounts.rounds * amounts.batches
    for name, ours, theirs in (
        ("exists, a hit", store.exists_hit, reference.exists_hit),
        ("exists, a miss", store.exists_miss, reference.exists_miss),
        ("get", store.get, reference.get),
        ("set", store.set, reference.set),
    ):
        yield _in_turns(name, batches, store, ours, theirs)
    store.forget_new()
    reference.forget_new()
    scans = _scans(store.pages, amounts)
    yield _in_turns("scan", scans, store, store.scan, reference.scan)
    if store.storage.capabilities.shared:
        yield _in_turns("open", amounts.rounds, store, store.open, reference.open)


def _scans(pages: int, amounts: Amounts) -> int:
    return 1 if pages > _ONE_SCAN_ABOVE else amounts.rounds


def _cleared(store: FilledStore) -> Sample:
    sample = store.clear()
    store.refill()
    return sample


def _in_turns(
    name: str,
    turns: int,
    store: FilledStore,
    ours: Callable[[], Sample],
    theirs: Callable[[], Sample],
) -> Cost:
    """Measure both stores in turns. Begin and end with the reference."""
    reference = [theirs()]
    samples: list[Sample] = []
    for _ in range(turns):
        samples.append(ours())
        reference.append(theirs())
    return _cost(name, store, samples, reference)


def _evictions(store: FilledStore, reference: FilledStore, turns: int) -> Cost:
    """Measure evictions in turns.

    The cost is the mean, because only some evictions look for pages to evict.
    """
    samples = [(store.evict(turns), reference.evict(turns)) for _ in range(turns)]
    ours, theirs = (sum(each, Sample()) for each in zip(*samples, strict=True))
    return _cost("evict", store, [ours], [theirs])


def _cost(
    name: str, store: FilledStore, samples: Sequence[Sample], reference: Sequence[Sample]
) -> Cost:
    wall_us = _median_us(sample.wall_s / sample.count for sample in samples)
    return Cost(
        operation=name,
        pages=store.pages,
        wall_us=wall_us,
        cpu_us=_median_us(sample.cpu_s / sample.count for sample in samples),
        ratio=wall_us / _median_us(sample.wall_s / sample.count for sample in reference),
    )


def _median_us(seconds: Iterable[float]) -> float:
    return 1e6 * statistics.median(seconds)


# --- tables --------------------------------------------------------------------------------------


def table(costs: Sequence[Cost], cell: Callable[[Cost], str]) -> list[str]:
    """Return the lines of a Markdown table: a row for each operation, a column for each size."""
    sizes = sorted({cost.pages for cost in costs})
    rows = dict.fromkeys(cost.operation for cost in costs)
    cells = {(cost.operation, cost.pages): cell(cost) for cost in costs}
    head = markdown_head(["", *(f"{size:,}" for size in sizes)]).split("\n")
    body = ([row, *(cells.get((row, size), "") for size in sizes)] for row in rows)
    return [*head, *map(markdown_row, body)]


def cost_cell(cost: Cost) -> str:
    """Return the wall time, followed by the processor time."""
    if cost.operation == "bytes":
        return f"{cost.wall_us:.0f}"
    return f"{cost.wall_us:.3g} ({cost.cpu_us:.3g})"


def ratio_cell(cost: Cost) -> str:
    """Return the ratio to the store of 10^3 pages."""
    return "" if cost.ratio is None else f"{cost.ratio:.2f}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags."""
    parser = Parser(__doc__, rounds=5)
    add = parser.add_argument
    add(
        "--stores",
        type=names,
        default=_STORES,
        help=f"of {', '.join(PLACES)} (default: %(default)s)",
    )
    add("--pages", default=_PAGES, help="sizes of the stores (default: %(default)s)")
    add("--batches", type=int, default=4, help="in a round (default: %(default)s)")
    add("--batch", type=int, default=128, help="pages in a call (default: %(default)s)")
    add("--page-nbytes", type=int, default=64, help="a multiple of 32 (default: %(default)s)")
    add("--processes", type=int, default=2, help="that fill a store (default: %(default)s)")
    add("--path", type=Path, default=default_parent(), metavar="DIRECTORY", help=_PATH_HELP)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every store, and print two tables for each."""
    chosen = parse(arguments)
    amounts = Amounts(**{each.name: getattr(chosen, each.name) for each in fields(Amounts)})
    report: dict[str, Any] = {"facts": machine_facts(chosen.path or Path("/tmp")), "stores": {}}  # noqa: S108
    for name in chosen.stores:
        costs: list[Cost] = []
        for pages in map(int, chosen.pages.split(",")):
            for cost in measured(name, pages, amounts):
                costs.append(cost)
                console.print(
                    f"{name} {pages:,} {cost.operation}: {cost_cell(cost)} {ratio_cell(cost)}"
                )
        report["stores"][name] = [asdict(cost) for cost in costs]
        print(f"\n{name}: us a page, or a whole `open`; in brackets processor time of the client\n")
        print("\n".join(table(costs, cost_cell)))
        print(f"\n{name}: the same in parts of a store of {REFERENCE_PAGES:,} pages\n")
        print("\n".join(table(costs, ratio_cell)), flush=True)
        if chosen.json is not None:
            chosen.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
