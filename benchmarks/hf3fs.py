"""Compare the `hf3fs` backend with the disk's own limit and SGLang's `HiCacheHF3FS`, in one process.

    python benchmarks/hf3fs.py [--sizes KIB,KIB] [--rounds N] [--quick] [--json FILE] [--path DIRECTORY]

`make bench-hf3fs` makes an environment that has SGLang's backend; elsewhere its rows are left out.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import _sglang
from _harness import MIB, Report, scratch
from _hf3fs_stores import PlainSlots, SGLangHf3fsStore
from _our_stores import in_directory
from file import Bench, Get, SetMore, benches, parser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from file import StoreFactory

THREADS = 4
SGLANG = SGLangHf3fsStore.name
# Space in each slot for two marks and a frame, one block each.
_BESIDE_NBYTES = 3 * 4096


def factories(bench: Bench, *, direct: bool) -> list[StoreFactory]:
    """Return the candidates with slots, either with O_DIRECT or buffered."""
    plain = partial(PlainSlots, direct=direct, capacity_pages=bench.capacity_pages)
    how = "O_DIRECT" if direct else "buffered"
    ours: dict[str, Any] = {
        "direct": direct,
        "capacity_nbytes": bench.capacity_nbytes,
        "detail": f", {how}",
    }
    return [
        partial(plain, threads=1),
        partial(plain, threads=THREADS),
        partial(in_directory, "hf3fs", **ours),
        partial(in_directory, "hf3fs", checksum="none", **ours),
        partial(in_directory, "hf3fs", checksum="xxh3", **ours),
    ]


def sglang_stores(bench: Bench) -> list[StoreFactory]:
    """Return SGLang's backend, which is buffered with its mock client."""
    if not _sglang.is_installed():
        return []
    return [partial(SGLangHf3fsStore, capacity_pages=bench.capacity_pages)]


def bench_slots(bench: Bench, *, direct: bool) -> None:
    """Measure gets of one batch, and sets of new batches into a full store."""
    how = "O_DIRECT" if direct else "buffered"
    alone = f"plain slots, {how}, 1 thread"
    limit = f"plain slots, {how}, {THREADS} threads"
    chosen = factories(bench, direct=direct) + ([] if direct else sglang_stores(bench))
    for title, kind in (("get", Get), ("set, at capacity", partial(SetMore, full=True))):
        candidates = [kind(factory, bench) for factory in chosen]
        section = bench.measure(f"{title}, {how}", candidates, (alone, limit, SGLANG))
        for candidate in candidates:
            candidate.close()
        if direct and bench.page_nbytes == MIB:
            bench.report.aim(section, f"ours: Hf3fsStorage, {how}", alone, 0.85)
            bench.report.aim(section, f"ours: page store, none, {how}", limit, 0.85)
        bench.report.aim(section, f"ours: Hf3fsStorage, {how}", SGLANG, 1.0)
        bench.report.aim(section, f"ours: page store, none, {how}", SGLANG, 1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__).parsed(arguments)
    with scratch(options.path) as root:
        report = Report.begin(root, distributions=["numpy", *_sglang.libraries("torch")])
        _sglang.tell("bench-hf3fs")
        beside = {"overhead_nbytes": _BESIDE_NBYTES, "index_nbytes": 64 * MIB}
        for bench in benches(root, report, options, **beside):
            for direct in (True, False):
                bench_slots(bench, direct=direct)
        report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
