"""`hicache bench`: put a load on a store, measure it, and remove every page afterwards."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_storage import config
from hicache_storage.cli.ages import age
from hicache_storage.cli.output_files import add_output_arguments, check_outputs, write_outputs
from hicache_storage.cli.page_sizes import (
    DEFAULT_PAGE_TOKENS,
    add_model_argument,
    model_page_nbytes,
)
from hicache_storage.cli.printing import output_console, print_lines
from hicache_storage.cli.progress import meter
from hicache_storage.cli.signal_stop import SignalStop
from hicache_storage.cli.sizes import parse_share, size
from hicache_storage.cli.stores import (
    add_evict_argument,
    add_store_arguments,
    open_store,
    store_choice,
)
from hicache_storage.errors import ConfigError, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.cli.operations.bench.comparison import Cell
    from hicache_storage.cli.operations.bench.load import BenchSettings

SUMMARY = "Put a load on a store, and measure latencies, bandwidth and processor time."

_FOUND = 1
_MOST_THREADS = 256
_MOST_BATCH = 1024
_MOST_PAGES = 10_000_000_000
_MOST_WORKING_PAGES = 100_000_000
"""The hashes of so many pages take about 13 GB of memory."""
_OPERATIONS = ("read", "write", "look-up")
_MIX = "read=70,write=20,look-up=10"
_DURATION_S = 10.0
_METRICS = ("throughput", "p50", "p99", "p99.9", "cpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_store_arguments(parser)
    _add_page_arguments(parser)
    _add_load_arguments(parser)
    add = add_output_arguments(parser).add_argument
    add(
        "--compare",
        type=Path,
        metavar="BEFORE.json",
        help="show ratios to an earlier run; exit code 1 if a figure is worse than tolerated",
    )
    add(
        "--tolerance",
        type=_tolerance,
        action="append",
        metavar="[NAME=]SHARE",
        help="how much worse a figure may be: 20%% for all, or p99=30%% for one"
        f" of {', '.join(_METRICS)}; may be given several times (default: 25%%, p99=50%%,"
        " p99.9=100%%)",
    )


def _add_page_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pages")
    add = group.add_argument
    add_model_argument(group)
    add(
        "--page-bytes",
        type=size,
        action="append",
        metavar="BYTES",
        help="the size of a page, instead of --model; may be given several times",
    )
    add(
        "--working-set",
        type=size,
        default="256MiB",
        metavar="BYTES",
        help="how much to write before the load, for each page size (default: %(default)s); the store"
        " holds up to twice as much",
    )
    add_evict_argument(parser)


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    add = group.add_argument
    add(
        "--threads",
        type=config.int_up_to(_MOST_THREADS),
        action="append",
        metavar="N",
        help="number of threads that make calls; may be given several times (default: 4)",
    )
    add(
        "--batch-pages",
        type=config.int_up_to(_MOST_BATCH),
        default=16,
        metavar="N",
        help="pages in one call (default: %(default)s)",
    )
    add(
        "--mix",
        type=_mix,
        default=_MIX,
        metavar="MIX",
        help="weight of each kind of call (default: %(default)s)",
    )
    add(
        "--rate",
        type=config.int_up_to(_MOST_PAGES),
        metavar="PAGES",
        help="at most this many pages a second in all calls (default: as fast as possible)",
    )
    length = group.add_mutually_exclusive_group()
    length.add_argument(
        "--duration",
        type=age,
        metavar="TIME",
        help="how long to run each page size with each number of threads, such as 30s (default: 10s)",
    )
    length.add_argument(
        "--pages",
        type=config.int_up_to(_MOST_PAGES),
        metavar="N",
        help="end after calls with this many pages in all, instead",
    )
    add(
        "--timeout",
        type=age,
        default="10s",
        metavar="TIME",
        help="deadline of a call (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the load, and print the figures.

    Return 0. Return 1 if calls failed, pages may be left, or a figure is worse than the tolerance
    allows. Return 128 plus the signal's number if a signal ended the run.
    """
    check_outputs(arguments)
    choice = store_choice(arguments)
    from hicache_storage.cli.operations.bench import comparison  # noqa: PLC0415 - wrong flags fail fast
    from hicache_storage.cli.operations.bench.run import run_bench  # noqa: PLC0415

    settings = _settings(arguments, choice)
    before = None
    if arguments.compare is not None:
        before = comparison.read_before(arguments.compare)
        comparison.check_comparable(before, settings.as_json())
    if not arguments.evict:
        _require_free(choice, settings)
    with open_store(choice) as storage, SignalStop() as stop:
        report: dict[str, Any] = {
            "backend": choice.backend,
            **run_bench(storage, settings, stop.event, meter),
        }
        for name, part in islice(storage.parts().items(), 1):
            alone = run_bench(part, settings, stop.event, meter)
            report["first_part"] = {"name": name, **alone}
            report["problems"] += [f"{name} alone: {problem}" for problem in alone["problems"]]
            ratios = comparison.ratios_to_first_part(report)
            report["first_part"]["ratios"] = [cell.as_json() for cell in ratios]
        report["interrupted"] = stop.signal is not None
    cells: Sequence[Cell] = ()
    if before is not None:
        cells = comparison.compare(before, report, _tolerances(arguments))
        report["problems"] += comparison.worse_problems(cells)
        report["comparison"] = [cell.as_json() for cell in cells]
    _publish(report, cells, arguments)
    if stop.signal is not None:
        return 128 + stop.signal
    return _FOUND if report["problems"] else 0


def _require_free(choice: config.StorageChoice, settings: BenchSettings) -> None:
    """Refuse a load that the store has no free space for: its working set, and as much in writes."""
    from hicache_storage.cli.operations.free_space import require_free, stored_nbytes  # noqa: PLC0415

    def needed_nbytes(alignment: int) -> int:
        return 2 * max(
            max(settings.batch_pages, settings.working_set_nbytes // nbytes)
            * stored_nbytes(nbytes, alignment)
            for nbytes in settings.page_sizes
        )

    advice = "use a smaller --working-set, --page-bytes or --batch-pages"
    require_free("bench", choice, needed_nbytes, advice)


def _settings(arguments: argparse.Namespace, choice: config.StorageChoice) -> BenchSettings:
    from hicache_storage.cli.operations.bench.load import BenchSettings, Operation  # noqa: PLC0415

    page_tokens = choice.page_tokens or DEFAULT_PAGE_TOKENS
    duration_s: float | None = arguments.duration
    if duration_s is None and arguments.pages is None:
        duration_s = _DURATION_S
    sizes = arguments.page_bytes or [model_page_nbytes(arguments.model, page_tokens)]
    if (pages := arguments.working_set // min(sizes)) > _MOST_WORKING_PAGES:
        raise ConfigError(
            f"--working-set: has {pages:,} pages, but the verb can remember"
            f" {_MOST_WORKING_PAGES:,}: choose a smaller one, or larger pages"
        )
    return BenchSettings(
        page_sizes=tuple(dict.fromkeys(sizes)),
        page_tokens=page_tokens,
        threads=tuple(dict.fromkeys(arguments.threads or [4])),
        batch_pages=arguments.batch_pages,
        mix={Operation(name): weight for name, weight in arguments.mix.items()},
        duration_s=duration_s,
        pages=arguments.pages,
        working_set_nbytes=arguments.working_set,
        timeout_s=arguments.timeout,
        rate_pages_per_s=arguments.rate,
    )


def _mix(text: str) -> dict[str, float]:
    """Parse the weight of each operation. Usable as an argparse type."""
    mix: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.partition("=")
        is_number = weight.isascii() and weight.isdecimal() and len(weight) < 10
        if name not in _OPERATIONS or name in mix or not is_number:
            raise argparse.ArgumentTypeError(
                f"must be weights like {_MIX}, each name at most once, not {shown(text)!r}"
            )
        mix[name] = float(weight)
    if not any(mix.values()):
        raise argparse.ArgumentTypeError(
            f"must have at least one weight above 0, not {shown(text)!r}"
        )
    return {name: weight for name, weight in mix.items() if weight}


def _tolerance(text: str) -> tuple[str | None, float]:
    """Parse `p99=30%`, or `20%` for all figures (name None). Usable as an argparse type."""
    before, equals, after = text.partition("=")
    name, value = (before, parse_share(after)) if equals else (None, parse_share(before))
    if value is None or (name is not None and name not in _METRICS):
        raise argparse.ArgumentTypeError(
            f"must be a share such as 20%, or one of {', '.join(_METRICS)} with a share such as"
            f" p99=30%, not {shown(text)!r}"
        )
    return name, value


def _tolerances(arguments: argparse.Namespace) -> dict[str, float]:
    """Return each figure's tolerance: the flag for it, or the flag for all figures, or the default."""
    from hicache_storage.cli.operations.bench.comparison import TOLERANCES  # noqa: PLC0415

    given: dict[str | None, float] = dict(arguments.tolerance or ())
    return {name: given.get(name, given.get(None, default)) for name, default in TOLERANCES.items()}


def _publish(report: dict[str, Any], cells: Sequence[Cell], arguments: argparse.Namespace) -> None:
    from hicache_storage.cli.operations.bench.html_report import html_page  # noqa: PLC0415
    from hicache_storage.cli.operations.bench.tables import tables  # noqa: PLC0415

    print_lines(output_console(), tables(report, cells))
    write_outputs(arguments, report, lambda: html_page(report, cells))
