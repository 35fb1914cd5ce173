"""Measure what 1 to 8 tensor parallel ranks move together over one store, with every byte checked.

    .venv/bin/python benchmarks/rank_scale.py [--stores file,redis] [--ranks 1,2,4,8] [--rounds N]
                                              [--conversations N] [--path DIRECTORY]

Each run is a `hicache replay` of the same trace and the same model, whose heads the ranks share. More
ranks move the same bytes in more and smaller pages. A run fails unless the ranks find every block that
an infinite cache has, drop no write, and read exactly the bytes that were written.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _disk import default_parent
from _harness import markdown_head, markdown_row, names, run_verb
from _scale_places import PLACES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_POOL = "kv:mha,layers=8,heads=8,dim=16"
_PATH_HELP = "for the files (default: tmpfs where there is one)"
_HOST_NBYTES = 160 << 20
"""L2 of all ranks together: 640 pages, which are 80 blocks."""
_TITLES = ("", "requests/s", "MB/s", "1000 pages/s", "prefetch p50, p99", "verified", "corrupt")


def replay(name: str, config: Mapping[str, Any], ranks: int, conversations: int) -> dict[str, Any]:
    """Return the figures of one run.

    Raises:
        RuntimeError: A block or a write was lost, or a byte was wrong.
    """
    figures = run_verb(
        "replay",
        *("--hicache-storage-backend", name),
        *("--hicache-storage-backend-extra-config", json.dumps(config)),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--pool", _POOL, "--scale-bytes", "1", "--page-size", "64"),
        *("--host-size", str(_HOST_NBYTES // ranks), "--ranks", str(ranks)),
        *("--conversations", str(conversations)),
    )
    blocks = figures["blocks"]
    found = blocks["l2_hits"] + blocks["l3_hits"]
    if found != blocks["ideal_hits"] or figures["dropped_write_pages"] or figures["corrupt_pages"]:
        raise RuntimeError(f"{name}, {ranks} ranks: a block, a write or a byte was lost: {figures}")
    return figures


def row(name: str, ranks: int, runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the cells of a table row: medians over the runs."""
    median = statistics.median
    moved = [run["l3_read"]["nbytes"] + run["l3_write"]["nbytes"] for run in runs]
    pages = [_rank_pages(run) for run in runs]
    seconds = [run["elapsed_s"] for run in runs]
    waits = [1e3 * median([run["prefetch"][p] for run in runs]) for p in ("p50_s", "p99_s")]
    return [
        f"`{name}`, {ranks} rank{'s' * (ranks > 1)}",
        f"{median([run['requests'] / run['elapsed_s'] for run in runs]):.1f}",
        f"{median([n / s / 1e6 for n, s in zip(moved, seconds, strict=True)]):.0f}",
        f"{median([n / s / 1000 for n, s in zip(pages, seconds, strict=True)]):.2f}",
        f"{waits[0]:.1f}, {waits[1]:.1f} ms",
        f"{sum(run['verified_nbytes'] for run in runs) / 1e9:.2f} GB",
        str(sum(run["corrupt_pages"] for run in runs)),
    ]


def _rank_pages(run: Mapping[str, Any]) -> int:
    """Return how many pages all ranks together have read and written."""
    ranks: Mapping[str, list[int]] | None = run["ranks"]
    if ranks is not None:
        return sum(ranks["written_pages"]) + sum(ranks["loaded_pages"])
    counters: Mapping[str, int] = run["controller"]
    return counters["written_pages"] + counters.get("loaded_pages", 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every number of ranks in turns, and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--stores",
        type=names,
        default="file,redis",
        help="(default: %(default)s)",
    )
    add("--ranks", default="1,2,4,8", help="(default: %(default)s)")
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    add("--conversations", type=int, default=30, help="of the synthetic trace (default: 30)")
    add("--path", type=Path, default=default_parent(), metavar="DIRECTORY", help=_PATH_HELP)
    chosen = parser.parse_args(arguments)
    sizes = [int(size) for size in chosen.ranks.split(",")]
    print(markdown_head(_TITLES))
    for name in chosen.stores:
        runs: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
        for _ in range(chosen.rounds):
            for size, done in runs.items():
                with PLACES[name](chosen.path) as place:
                    done.append(replay(name, place.config, size, chosen.conversations))
        for size, done in runs.items():
            print(markdown_row(row(name, size, done)), flush=True)


if __name__ == "__main__":
    main()
