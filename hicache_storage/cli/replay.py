"""`hicache replay`: replay a trace through the cache and a storage, and verify every byte."""

from __future__ import annotations

import argparse
import json
import logging
import re
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hicache_storage import config
from hicache_storage.cli.program import add_cwd_to_path
from hicache_storage.errors import ConfigError
from hicache_storage.replay.disruptions import Disruptions
from hicache_storage.replay.models import (
    PRESETS,
    PoolShape,
    check_pools,
    parse_number,
    parse_pool,
    parse_scale,
)
from hicache_storage.replay.warning_log import warnings_to
from hicache_storage.scalars import parse_nbytes

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from rich.progress import Progress

    from hicache_storage.events.settings import EventSettings
    from hicache_storage.page_store.admission import AdmissionSettings
    from hicache_storage.replay.driver import ReplaySettings
    from hicache_storage.replay.trace import Request

SUMMARY = "Replay a trace of requests through the cache and a storage, and verify every byte."

_PAGE_TOKENS = 64
_CONVERSATIONS = 75
_CORRUPT = 1
_MOST_REQUESTS = 10_000_000
_MOST_CONVERSATIONS = 1_000_000
_MOST_RANKS = 256
_MOST_REMEMBERED_PAGES = 1_000_000_000
_SEED = re.compile(r"-?[0-9]{1,18}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    config.add_arguments(parser)
    _add_trace_arguments(parser)
    _add_cache_arguments(parser)
    _add_admission_arguments(parser)
    _add_rank_arguments(parser)
    Disruptions.add_arguments(parser)
    _add_observer_arguments(parser)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures to a file, too"
    )


def _add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("trace").add_argument
    add(
        "--trace", type=Path, metavar="FILE[.gz]", help="in the Mooncake format; default: synthetic"
    )
    add(
        "--requests",
        type=config.int_up_to(_MOST_REQUESTS),
        metavar="N",
        help="stop after the first N requests of the trace",
    )
    add("--seed", type=_seed, metavar="N", help="of the synthetic trace (default: 0)")
    add(
        "--conversations",
        type=config.int_up_to(_MOST_CONVERSATIONS),
        metavar="N",
        help=f"in the synthetic trace (default: {_CONVERSATIONS}, or more where --requests needs more)",
    )
    add(
        "--speed",
        type=_speed,
        metavar="X",
        help="X times real time, e.g. 10 or 0.5 (default: as fast as possible)",
    )


def _add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cache")
    shapes = group.add_mutually_exclusive_group()
    shapes.add_argument(
        "--model",
        choices=PRESETS,
        default="llama-3.1-8b",
        help="KV shape of a known model and a draft of one layer (default: %(default)s)",
    )
    shapes.add_argument(
        "--pool",
        action="append",
        metavar="NAME:SHAPE",
        help="instead of --model, once a pool: kv:mha,layers=32,heads=8,dim=128,dtype=bfloat16"
        " draft:mla,layers=1,dim=576",
    )
    add = group.add_argument
    add(
        "--scale-bytes",
        type=_scale,
        default="1/64",
        metavar="FACTOR",
        help="make pages smaller, at most 16,384 times: 1/64, 0.015625 and 64 mean the same; 1 is real"
        " size (default: 1/64)",
    )
    add(
        "--host-size",
        type=_nbytes,
        default="128MiB",
        metavar="BYTES",
        help='L2, e.g. "2GiB", shared by all pools (default: %(default)s)',
    )
    add(
        "--checksum",
        choices=("xxh3", "none"),
        default="xxh3",
        help="of pages in the storage (default: %(default)s)",
    )


def _add_admission_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("writes to the storage").add_argument
    add("--second-use", action="store_true", help="write a page when it is offered a second time")
    add(
        "--remembered-pages",
        type=config.int_up_to(_MOST_REMEMBERED_PAGES),
        metavar="N",
        help="pages that --second-use remembers (default: 1,000,000)",
    )
    add(
        "--write-rate",
        type=_nbytes,
        metavar="BYTES",
        help='most bytes a second of the trace\'s own time, on each rank, e.g. "200MiB"',
    )
    add(
        "--write-burst",
        type=_nbytes,
        metavar="BYTES",
        help="most bytes at once after a pause (default: ten seconds of --write-rate)",
    )


def _add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("ranks").add_argument
    add(
        "--ranks",
        type=config.int_up_to(_MOST_RANKS),
        default=1,
        metavar="N",
        help="tensor parallel ranks, a process each, every one with --host-size of L2 (default: 1)",
    )
    add(
        "--head-group",
        type=config.positive_int,
        metavar="HEADS",
        help="store so many KV heads a page, for runs with another number of --ranks to find",
    )


def _add_observer_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("traces and events").add_argument
    add(
        "--tracing",
        action="store_true",
        help="make OpenTelemetry spans, for the tracer provider that opentelemetry-instrument sets up",
    )
    add(
        "--events-endpoint",
        metavar="ADDRESS",
        help='publish KV events over ZeroMQ: bind "tcp://*:5557", or connect to "tcp://router:5557"',
    )
    add(
        "--events-replay-endpoint",
        metavar="ADDRESS",
        help='send past events again: bind "tcp://*:5558"',
    )


def run(arguments: argparse.Namespace) -> int:
    """Replay, and return 0, 1 for corrupt pages, or 128 plus the number of the signal that ended it."""
    choice = config.StorageChoice.from_arguments(arguments)
    _check_output(arguments.json)
    requests = _requests(arguments)
    settings = _settings(arguments, choice)
    disruptions = Disruptions.from_arguments(arguments, len(requests))
    for storage in filter(None, (choice, disruptions.swap)):
        add_cwd_to_path(storage.backend, storage.config)
    from hicache_storage.replay.job import ReplayJob, run_job  # noqa: PLC0415 - invalid flags fail fast
    from hicache_storage.replay.ranks import run_ranks  # noqa: PLC0415

    job = ReplayJob(choice, settings, disruptions, requests)
    with warnings_to(_StderrHandler()), _SignalStop() as stop, _progress() as progress:
        task = progress.add_task("replaying", total=len(requests))
        figures = (run_job if arguments.ranks == 1 else run_ranks)(
            job,
            stop=stop.event,
            progress=lambda done: progress.update(task, completed=done),
        )
    report = {
        "backend": choice.backend,
        "trace": str(arguments.trace or "synthetic"),
        "trace_requests": len(requests),
        "interrupted": stop.signal is not None,
        **figures,
    }
    _publish(report, arguments.json)
    if stop.signal is not None:
        return 128 + stop.signal
    return _CORRUPT if report["corrupt_pages"] else 0


# --- flags to objects ------------------------------------------------------------------------------


def _requests(arguments: argparse.Namespace) -> Sequence[Request]:
    from hicache_storage.replay.trace import read_trace, synthetic_trace  # noqa: PLC0415

    if arguments.trace is not None:
        for name in ("seed", "conversations"):
            if getattr(arguments, name) is not None:
                raise ConfigError(f"--{name} is for the synthetic trace: leave it or --trace out")
        return read_trace(arguments.trace, arguments.requests)
    seed, limit = arguments.seed or 0, arguments.requests
    if arguments.conversations is not None:
        return synthetic_trace(seed, conversations=arguments.conversations, limit=limit)
    conversations = _CONVERSATIONS
    while len(requests := synthetic_trace(seed, conversations=conversations, limit=limit)) < (
        limit or 0
    ):
        conversations *= 2
    return requests


def _settings(arguments: argparse.Namespace, choice: config.StorageChoice) -> ReplaySettings:
    from hicache_storage.controller import (  # noqa: PLC0415
        ControllerSettings,
        PrefetchPolicy,
        WritePolicy,
    )
    from hicache_storage.replay.driver import ReplaySettings  # noqa: PLC0415
    from hicache_storage.topology import Grid, Topology  # noqa: PLC0415

    preset = PRESETS[arguments.model]
    pools = check_pools([parse_pool(text) for text in arguments.pool or ()] or preset.pools)
    return ReplaySettings(
        model=choice.served_model_name or ("custom" if arguments.pool else preset.model),
        pools=tuple(
            PoolShape(pool.name, pool.shape.scaled(arguments.scale_bytes)) for pool in pools
        ),
        page_tokens=choice.page_tokens or _PAGE_TOKENS,
        layout=choice.mem_layout,
        host_nbytes=arguments.host_size,
        checksum=arguments.checksum,
        controller=ControllerSettings(
            prefetch_policy=PrefetchPolicy(choice.prefetch_policy),
            write_policy=WritePolicy(choice.write_policy),
            prefetch_threshold_tokens=choice.prefetch_threshold_tokens,
            prefetch_timeout_base_s=choice.prefetch_timeout_base_s,
            prefetch_timeout_per_ki_token_s=choice.prefetch_timeout_per_ki_token_s,
        ),
        admission=_admission(arguments),
        speed=arguments.speed,
        topology=Topology(tp_size=arguments.ranks),
        grid=Grid(head_group=arguments.head_group),
        events=_events(arguments),
        tracing=arguments.tracing,
    )


def _admission(arguments: argparse.Namespace) -> AdmissionSettings:
    from hicache_storage.page_store.admission import AdmissionSettings  # noqa: PLC0415

    for flag, needed in (("remembered_pages", "second_use"), ("write_burst", "write_rate")):
        if getattr(arguments, flag) is not None and not getattr(arguments, needed):
            names = (f"--{name.replace('_', '-')}" for name in (flag, needed))
            raise ConfigError("{} is for {}: give both, or neither".format(*names))
    fields = {
        "second_use": arguments.second_use,
        "remembered_pages": arguments.remembered_pages,
        "write_nbytes_per_s": arguments.write_rate,
        "write_burst_nbytes": arguments.write_burst,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return AdmissionSettings.parse("replay", given)


def _events(arguments: argparse.Namespace) -> EventSettings | None:
    from hicache_storage.events.settings import EventSettings  # noqa: PLC0415

    fields = {
        "endpoint": arguments.events_endpoint,
        "replay_endpoint": arguments.events_replay_endpoint,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if not given:
        return None
    if "endpoint" not in given:
        raise ConfigError("--events-replay-endpoint needs --events-endpoint")
    return EventSettings.parse("replay", given)


def _check_output(path: Path | None) -> None:
    """Refuse an unwritable report file before the run rather than after it."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--json {path}: is a directory, not a file")
    if not path.parent.is_dir():
        raise ConfigError(f"--json {path}: there is no directory {path.parent}")


def _speed(text: str) -> float:
    value = parse_number(text)
    if not value:
        raise argparse.ArgumentTypeError(
            f"must be a number greater than 0, such as 10 or 0.5, not {text!r}"
        )
    return value


def _seed(text: str) -> int:
    if _SEED.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}")
    return int(text)


def _scale(text: str) -> float:
    try:
        return parse_scale(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _nbytes(text: str) -> int:
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be a size like 512MiB or 2GiB, not {text!r}: {error}"
        ) from None


# --- terminal output -------------------------------------------------------------------------------


class _SignalStop:
    """Turns the first SIGINT or SIGTERM into an event. A second one has its previous effect."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _frame: object) -> None:
        self.signal = number
        self.event.set()
        self.__exit__()


class _StderrHandler(logging.Handler):
    """Prints each record on stderr as one line, without a traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        sys.stderr.write(f"hicache: {record.levelname.lower()}: {text}\n")


@contextmanager
def _progress() -> Generator[Progress, None, None]:
    """Show a progress bar on stderr if that is a terminal."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


def _publish(report: dict[str, Any], path: Path | None) -> None:
    from hicache_storage.cli.printing import output_console, print_lines  # noqa: PLC0415
    from hicache_storage.replay.tables import tables  # noqa: PLC0415

    print_lines(output_console(), tables(report))
    if path is None:
        return
    try:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written: {error.strerror}") from None
