"""Compare `hicache plan` with `hicache replay`: the predicted hit shares with the measured ones.

    .venv/bin/python benchmarks/plan_check.py --sizes 1000:10000 4000:20000 -- --trace FILE.jsonl.gz
    .venv/bin/python benchmarks/plan_check.py --sizes 300:1500 -- --conversations 1500 --seed 1

Sizes are blocks of 512 tokens in L2 and in L3. The flags after `--` choose the trace for both commands.
The replay stores pages with `file`, in its own directory, on tmpfs if there is one. A block takes 10
KiB there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from _disk import default_parent
from _harness import markdown_head, markdown_row, run_verb

_POOLS = ("kv:mha,layers=2,heads=1,dim=2", "draft:mha,layers=1,heads=1,dim=1")
_PAGE_NBYTES = 512 * (2 * 2 * 2 * 2 + 2 * 2)
_FRAME_NBYTES = 128
_TRAILER_NBYTES = 64
"""Bytes that the backend `file` adds to each page. The plan does not include them."""


def _report(verb: str, *flags: str) -> dict[str, Any]:
    pools = [flag for pool in _POOLS for flag in ("--pool", pool)]
    return run_verb(verb, *pools, "--page-size", "512", "--scale-bytes", "1", *flags)


def _check(host: int, storage: int, flags: list[str], scratch: Path) -> str:
    """Return a row of the table: the sizes, and the shares of L2 and L3, planned and measured."""
    host_size = ("--host-size", str(host * _PAGE_NBYTES))
    planned_nbytes = storage * (_PAGE_NBYTES + len(_POOLS) * _FRAME_NBYTES)
    plan = _report("plan", *flags, *host_size, "--storage-size", str(planned_nbytes))
    capacity = planned_nbytes + storage * len(_POOLS) * _TRAILER_NBYTES
    config = {"path": str(scratch / "pages"), "capacity_nbytes": capacity}
    replay = _report(
        "replay",
        *flags,
        *host_size,
        *("--hicache-storage-backend", "file"),
        *("--hicache-storage-backend-extra-config", json.dumps(config)),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
    )
    option, blocks = plan["options"][0], replay["blocks"]
    shares = [option["l2_hit_rate"], blocks["l2_hits"] / blocks["total"]]
    shares += [option["l3_hit_rate"], blocks["l3_hits"] / blocks["total"]]
    cells = [f"{host:,}", f"{storage:,}", *(f"{100 * share:.2f} %" for share in shares)]
    return markdown_row(cells)


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--sizes", nargs="+", required=True, metavar="L2:L3")
    parser.add_argument("flags", nargs="*")
    arguments = parser.parse_args()
    print(markdown_head(("L2", "L3", "in L2, planned", "replayed", "in L3, planned", "replayed")))
    for sizes in arguments.sizes:
        host, storage = (int(number) for number in sizes.split(":"))
        with tempfile.TemporaryDirectory(prefix="hicache-plan-", dir=default_parent()) as scratch:
            print(_check(host, storage, arguments.flags, Path(scratch)), flush=True)


if __name__ == "__main__":
    main()
