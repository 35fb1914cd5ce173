"""A run of `hicache bench`: for each page size, write pages, run the loads, and remove the pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache_storage import native
from hicache_storage.cli.operations.batches import batches, pages_per_batch
from hicache_storage.cli.operations.bench.load import Operation, Target, measure
from hicache_storage.cli.operations.bench.pages import Hashes, bench_space, fill, remove
from hicache_storage.page_store import PageStore, PageStoreSettings, Verdict
from hicache_storage.scalars import counted

if TYPE_CHECKING:
    import threading
    from collections import Counter
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from hicache_storage.cli.operations.bench.load import BenchSettings, Figures, Measured
    from hicache_storage.cli.progress import Meter
    from hicache_storage.storage import HiCacheStorage

FORMAT = 1
_FINE = frozenset({Verdict.OK, Verdict.MISS})
_LEAST_CLOSE_S = 10.0


def run_bench(
    storage: HiCacheStorage,
    settings: BenchSettings,
    stop: threading.Event,
    meter: Callable[[str, float | None], AbstractContextManager[Meter]],
) -> dict[str, Any]:
    """Run all loads. Return the figures as the fields of a report. Leave no page behind.

    `meter` makes a progress bar from a title and a duration. After `stop` no load begins, and the
    figures so far are returned.
    """
    report: dict[str, Any] = {
        "format": FORMAT,
        "settings": settings.as_json(),
        "data_plane": native.implementation,
        "fills": [],
        "loads": [],
        "left_pages": 0,
    }
    for page_nbytes in settings.page_sizes:
        if not stop.is_set():
            _PageSize(_Run(storage, settings, stop, meter, report), page_nbytes).run()
    report["problems"] = [*_problems(report)]
    return report


@dataclass(frozen=True, slots=True)
class _Run:
    """The parts that a run uses for all page sizes."""

    storage: HiCacheStorage
    settings: BenchSettings
    stop: threading.Event
    meter: Callable[[str, float | None], AbstractContextManager[Meter]]
    report: dict[str, Any]


class _PageSize:
    """The loads with pages of one size."""

    def __init__(self, run: _Run, page_nbytes: int) -> None:
        self._storage, self._settings, self._stop = run.storage, run.settings, run.stop
        self._meter, self._report = run.meter, run.report
        settings = run.settings
        self._space = bench_space(page_nbytes, settings.page_tokens)
        self._hashes = Hashes()
        pages = max(settings.batch_pages, settings.working_set_nbytes // page_nbytes)
        self._working_set = self._hashes.take(pages)
        self._written: list[str] = []

    def run(self) -> None:
        """Fill the store, measure with each number of threads, and remove every page."""
        store = self._open()
        try:
            with self._meter("filling", None) as shown:
                stored, verdicts = fill(store, self._space, self._working_set, shown, self._stop)
            self._report["fills"].append(
                {
                    "page_nbytes": self._space.page_nbytes,
                    "pages": len(self._working_set),
                    "verdicts": _by_name(verdicts),
                }
            )
            for threads in self._settings.threads if stored else ():
                if not self._stop.is_set():
                    self._measure(store, stored, threads)
        finally:
            store.close(max(self._settings.timeout_s, _LEAST_CLOSE_S))
            self._remove([*self._working_set, *self._written])

    def _open(self) -> PageStore:
        store = PageStore(self._storage, PageStoreSettings(timeout_s=self._settings.timeout_s))
        try:
            store.open_space(self._space)
        except BaseException:
            store.close()
            raise
        return store

    def _measure(self, store: PageStore, stored: Sequence[str], threads: int) -> None:
        settings = self._settings
        with self._meter(f"{threads} threads", settings.duration_s) as shown:
            target = Target(store, self._space, stored, self._hashes)
            measured = measure(target, settings, threads, shown, self._stop)
        self._report["loads"].append(_load_report(measured, self._space.page_nbytes, threads))
        self._written += measured.written
        self._make_room(store)

    def _make_room(self, store: PageStore) -> None:
        """Delete the pages that a load wrote, before the next load writes as many."""
        pages = pages_per_batch(store.framed(self._space), self._storage)
        for batch in batches(self._written, pages):
            if store.delete(self._space, batch) < len(batch):
                return  # the removal at the end tries again
        self._written.clear()

    def _remove(self, hashes: Sequence[str]) -> None:
        """Remove pages, and count the pages that may be left."""
        with self._meter("removing", None) as shown:
            self._report["left_pages"] += remove(
                self._storage, self._space, hashes, shown, self._settings.timeout_s
            )


def _load_report(measured: Measured, page_nbytes: int, threads: int) -> dict[str, Any]:
    elapsed_s = max(measured.elapsed_s, 1e-9)
    nbytes = sum(one.nbytes_by_second.total() for one in measured.operations.values())
    return {
        "page_nbytes": page_nbytes,
        "threads": threads,
        "elapsed_s": elapsed_s,
        "bytes_per_s": nbytes / elapsed_s,
        "cpu_s": measured.cpu_s,
        "cpu_s_per_gb": measured.cpu_s / (nbytes / 1e9) if nbytes else None,
        "operations": {
            operation.value: _figures_report(measured.operations[operation], elapsed_s)
            for operation in Operation
            if operation in measured.operations
        },
    }


def _figures_report(figures: Figures, elapsed_s: float) -> dict[str, Any]:
    latencies = figures.latencies
    whole_seconds = range(max(1, int(elapsed_s)))
    return {
        "calls": figures.calls,
        "pages_per_s": figures.verdicts[Verdict.OK] / elapsed_s,
        "bytes_per_s": figures.nbytes_by_second.total() / elapsed_s,
        "p50_s": latencies.quantile(0.5),
        "p99_s": latencies.quantile(0.99),
        "p999_s": latencies.quantile(0.999),
        "verdicts": _by_name(figures.verdicts),
        "curve": latencies.curve(),
        "series": [(second, figures.nbytes_by_second[second]) for second in whole_seconds],
        "slowest_s_series": [
            (second, figures.slowest_s_by_second.get(second, 0.0)) for second in whole_seconds
        ],
    }


def _problems(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence about each thing that went wrong."""
    fine = {verdict.value for verdict in _FINE}
    for filled in report["fills"]:
        for verdict, pages in filled["verdicts"].items():
            if verdict not in fine:
                yield f"filling: {pages:,} of {counted(filled['pages'], 'page')}: {_words(verdict)}"
    totals: dict[tuple[str, str], int] = {}
    for load in report["loads"]:
        for operation, figures in load["operations"].items():
            for verdict, pages in figures["verdicts"].items():
                if verdict not in fine:
                    totals[operation, verdict] = totals.get((operation, verdict), 0) + pages
    for (operation, verdict), pages in totals.items():
        yield f"{operation}: {counted(pages, 'page')}: {_words(verdict)}"
    if report["left_pages"]:
        yield (
            f"{counted(report['left_pages'], 'page')} may be left: when the store works again,"
            " remove them with hicache gc --model hicache-bench --yes"
        )


def _words(verdict: str) -> str:
    return verdict.replace("_", " ")


def _by_name(verdicts: Counter[Verdict]) -> dict[str, int]:
    return {verdict.value: verdicts[verdict] for verdict in Verdict if verdicts[verdict]}
