"""Replay a trace over a small `file`, a large `s3`, and `tiered` of both. Count hits and written pages.

    .venv/bin/python benchmarks/tiered_trace.py -- --trace FILE.jsonl.gz
    .venv/bin/python benchmarks/tiered_trace.py --host-pages 100 --fast-pages 500 -- --conversations 200

The flags after `--` choose the trace. A page has 512 tokens and 2 KiB, so that the whole trace fits into
memory; bytes are printed for pages of the size that Llama 3.1 8B has. The figures are counts, so they do
not depend on how busy the machine is. Each row has a server (rclone) and a directory of its own, on
tmpfs if there is one. A row of the whole conversation trace takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _disk import default_parent
from _harness import markdown_head, markdown_row, run_verb
from _servers import servers

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMOTE = ("always", "second_use", "never")
WRITE = ("through", "back")
_POOL = "kv:mha,layers=1,heads=1,dim=1"
_PAGE_NBYTES = 512 * 2 * 2
_OVERHEAD_NBYTES = 128 + 64
"""The frame, and the trailer of `file`."""
_HASH_CHARACTERS = 64
_REAL_PAGE_TB = 512 * 32 * 8 * 128 * 2 * 2 / 1e12
_PATIENT = {"timeout_s": 60, "lookup_timeout_s": 30}
"""A busy machine must not cost hits here."""
_TITLES = (
    *("store", "hits", "of all pages", "fast tier"),
    *("pages to fast", "TB", "pages to large", "TB", "not copied"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """The counts of one replay. A page has one pool, and a tier that is not there counts 0."""

    name: str
    pages: int
    hits: int
    """Of L2 and the store."""
    fast_hits: int
    large_hits: int
    fast_written: int
    large_written: int
    not_copied: int
    """Copies between the tiers for which there was no memory."""

    def cells(self) -> list[str]:
        """Return the cells of a Markdown table."""
        found = self.fast_hits + self.large_hits
        return [
            self.name,
            f"{self.hits:,}",
            f"{self.hits / self.pages:.1%}".replace("%", " %"),
            f"{self.fast_hits / found if found else 0:.0%}".replace("%", " %"),
            f"{self.fast_written:,}",
            f"{self.fast_written * _REAL_PAGE_TB:.2f}",
            f"{self.large_written:,}",
            f"{self.large_written * _REAL_PAGE_TB:.2f}",
            f"{self.not_copied:,}",
        ]


class Stores:
    """The configs of a small and a large store, and of compositions of both."""

    def __init__(self, directory: Path, server: servers.S3Server, fast_pages: int) -> None:
        capacity = fast_pages * (_PAGE_NBYTES + _OVERHEAD_NBYTES)
        self.directory = directory
        self.objects = server.directory / "data"
        self.fast = {"path": str(directory / "fast"), "capacity_nbytes": capacity}
        self.large = {
            "bucket": "kv-cache",
            "create_bucket": True,
            "endpoint_url": server.endpoint_url,
            "access_key_id": server.access_key,
            "secret_access_key": server.secret_key,
            "timeout_s": 60,
        }

    def tiered(self, write: str, promote: str) -> dict[str, Any]:
        """Return the config of both as one store."""
        tiers = [
            {"name": "fast", "backend": "file", "config": self.fast},
            {"name": "large", "backend": "s3", "config": self.large},
        ]
        return {"tiers": tiers, "write": write, "promote": promote, **_PATIENT}


def replayed(stores: Stores, name: str, flags: Sequence[str]) -> Row:
    """Replay the trace over the store that a row names, and count.

    Raises:
        RuntimeError: A page was wrong or was not stored, or a tier failed.
    """
    backend, *policies = name.split()
    alone = {"file": stores.fast, "s3": stores.large}
    config = alone.get(backend) or stores.tiered(*policies)
    report = run_verb(
        "replay",
        *flags,
        *("--pool", _POOL, "--page-size", "512", "--scale-bytes", "1", "--keep"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend", backend),
        *("--hicache-storage-backend-extra-config", json.dumps(config)),
    )
    pages, storage = report["pages"], report["storage"]
    failed = sum(count for counter, count in storage.items() if counter.endswith("failed_calls"))
    if report["corrupt_pages"] or report["unsaved_pages"]["total"] or failed:
        raise RuntimeError(f"{name}: pages were lost, so the counts mean nothing: {storage}")
    if backend in alone:
        tier = "fast" if backend == "file" else "large"
        storage = {f"{tier}.{counter}": count for counter, count in storage.items()}
        storage[f"{tier}.hits"] = pages["l3_hits"]
    return Row(
        name,
        pages["total"],
        pages["l2_hits"] + pages["l3_hits"],
        storage.get("fast.hits", 0),
        storage.get("large.hits", 0),
        _pages_in(stores.directory / "fast") + storage.get("fast.evicted", 0),
        _pages_in(stores.objects),
        sum(count for counter, count in storage.items() if counter.endswith("_skipped")),
    )


def _pages_in(directory: Path) -> int:
    """Return how many files are called like a page. Rclone is slow at listing so many objects."""
    return sum(
        len(file) == _HASH_CHARACTERS for _, _, files in os.walk(directory) for file in files
    )


def row(name: str, fast_pages: int, flags: Sequence[str]) -> Row:
    """Return one row: `file`, `s3`, or `tiered WRITE PROMOTE`."""
    with (
        tempfile.TemporaryDirectory(prefix="hicache-tiers-", dir=default_parent()) as directory,
        servers.Rclone(Path(directory) / "server") as server,
    ):
        return replayed(Stores(Path(directory), server, fast_pages), name, flags)


NAMES = ("file", "s3", *(f"tiered {write} {promote}" for write in WRITE for promote in PROMOTE))


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--host-pages", type=int, default=1600, help="pages that fit into L2")
    parser.add_argument("--fast-pages", type=int, default=20_000, help="that fit into `file`")
    parser.add_argument("--rows", nargs="+", choices=NAMES, default=NAMES, metavar="ROW")
    parser.add_argument("flags", nargs="*", help="the flags of `hicache replay` for a trace")
    arguments = parser.parse_args()
    flags = [*arguments.flags, "--host-size", str(arguments.host_pages * _PAGE_NBYTES)]
    print(markdown_head(_TITLES), flush=True)
    for name in arguments.rows:
        print(markdown_row(row(name, arguments.fast_pages, flags).cells()), flush=True)


if __name__ == "__main__":
    main()
