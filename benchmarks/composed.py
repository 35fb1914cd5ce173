"""Compare `tiered` and `striped` with the bare store that they are built from, under the page store.

python benchmarks/composed.py [--sizes KIB,KIB] [--rounds N] [--json FILE]

The tier below does nothing, so a row of `tiered` shows what the composition costs a page of its first
tier: the check of its frame, and in a set the copy for the tier below. The stripes are two directories
of one disk. The last table has gets of pages that the first tier has, while the tier below hangs.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING

from _disk import default_parent
from _harness import KIB, MIB, Parser, Report, console, page_hashes_of, scratch, size_text
from _our_stores import OurPageStore, key_space
from _store import DIRECTIONS, BatchRun, memories
from hicache_backends.file import FileStorage
from hicache_backends.memory import MemoryStorage
from hicache_backends.striped import StripedSettings, StripedStorage
from hicache_backends.tiered import TieredSettings, TieredStorage

from hicache_storage.page import Page
from hicache_storage.testing import Fault, FaultyStorage, Odds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from _store import Direction, Memory

    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage

BATCH_PAGES = 128
SIZES = (64 * KIB, 1 * MIB)
LEAST = {64 * KIB: 0.85, 1 * MIB: 0.95}
BARE = "file"
STRIPED = "striped, 2 files"
LOOKS = 2000
TIMEOUT_S = 0.5


class Under(OurPageStore):
    """A storage under the page store, which deletes each batch before the next one."""

    def __init__(
        self, name: str, storage: HiCacheStorage, source: Memory, destination: Memory
    ) -> None:
        super().__init__(storage, source, destination)
        self.name = name

    def clear(self) -> None:
        self._store.delete(self._space, self.hashes)


class Hanging(MemoryStorage):
    """A store that has no page, and whose gets wait until `released`."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.released.wait()
        return super().batch_get(space, hashes, pages)


def nowhere() -> HiCacheStorage:
    """Return a storage that answers True and does nothing."""
    operations = ("batch_exists", "batch_set", "batch_delete")
    return FaultyStorage(MemoryStorage(), [Odds(each, Fault.LIE, 1.0) for each in operations])


def file_in(directory: Path) -> FileStorage:
    """Return a `file` storage in a new directory."""
    return FileStorage.from_config({"path": str(directory)})


def tiered(first: HiCacheStorage, lower: HiCacheStorage, **config: object) -> TieredStorage:
    """Return a composition of two open storages."""
    tiers = [{"name": name, "backend": "memory"} for name in ("first", "lower")]
    settings = TieredSettings.parse("tiered", {"tiers": tiers, **config})
    return TieredStorage({"first": first, "lower": lower}, settings)


def striped(*stripes: HiCacheStorage) -> StripedStorage:
    """Return a composition of open storages."""
    names = [f"s{number}" for number in range(len(stripes))]
    settings = StripedSettings.parse(
        "striped", {"stripes": [{"name": name, "backend": "memory"} for name in names]}
    )
    return StripedStorage(dict(zip(names, stripes, strict=True)), settings)


def bench(report: Report, root: Path, direction: Direction, nbytes: int, rounds: int) -> None:
    """Measure gets or sets of pages of one size, and record the aims."""
    batch = memories(BATCH_PAGES, nbytes)
    place = root / f"{direction}{nbytes}"
    compositions: dict[str, HiCacheStorage] = {
        "tiered, through": tiered(file_in(place / "through"), nowhere()),
        "tiered, back": tiered(file_in(place / "back"), nowhere(), write="back"),
        STRIPED: striped(file_in(place / "a"), file_in(place / "b")),
    }
    stores = [Under(BARE, file_in(place / "bare"), *batch)]
    stores += [Under(name, storage, *batch) for name, storage in compositions.items()]
    section = report.measure(
        f"{direction}, {BATCH_PAGES} pages of {size_text(nbytes)}",
        [
            BatchRun(store, direction, empty=store.clear, repeats=direction == "get")
            for store in stores
        ],
        rounds,
        work=batch[0].gb,
        baselines=[BARE],
    )
    for name in compositions:
        report.aim(section, name, BARE, 0.95 if name == STRIPED else LEAST[nbytes])


def bench_hang(root: Path) -> None:
    """Print how long gets take that a first tier answers, alone and above a tier that hangs."""
    nbytes = 64 * KIB
    source, destination = memories(1, nbytes)
    hanging = Hanging()
    above = tiered(file_in(root / "above"), hanging, timeout_s=TIMEOUT_S)
    stores = [Under(BARE, file_in(root / "alone"), source, destination)]
    stores.append(Under("tiered above a tier that hangs", above, source, destination))
    hashes = page_hashes_of("hang", 0, 1)
    for store in stores:
        store.prepare_set(hashes)
        store.set()
        store.prepare_get(hashes)
    began_s = time.perf_counter()
    missing = key_space(nbytes)
    above.batch_get(missing, page_hashes_of("absent", 0, 1), [Page(destination.views[0])])
    first_s = time.perf_counter() - began_s
    times: dict[str, list[float]] = {store.name: [] for store in stores}
    for _ in range(LOOKS):
        for store in stores:
            began_s = time.perf_counter()
            store.get()
            times[store.name].append(time.perf_counter() - began_s)
    console.print(f"gets of one page of {size_text(nbytes)}, {LOOKS:,} each, in turns")
    for name, taken_s in times.items():
        cuts = statistics.quantiles(taken_s, n=100)
        console.print(f"  {name}: median {cuts[49] * 1e6:.0f} us, p99 {cuts[98] * 1e6:.0f} us")
    console.print(f"  before, one miss waited {first_s:.2f} s (timeout_s {TIMEOUT_S:g})")
    hanging.released.set()
    for store in stores:
        store.close()


def main(arguments: Sequence[str] | None = None) -> int:
    options = Parser(__doc__, rounds=15, page_sizes=SIZES).parsed(arguments)
    report = Report.begin(default_parent(), distributions=["numpy"])
    with scratch(default_parent()) as root:
        for page_nbytes in options.sizes:
            for direction in DIRECTIONS:
                bench(report, root, direction, page_nbytes, options.rounds)
        bench_hang(root)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
