"""`hicache replay`: replay a trace through the cache and a storage, and verify every byte."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_storage import config
from hicache_storage.cli.output_files import check_outputs, write_outputs
from hicache_storage.cli.printing import output_console, print_lines
from hicache_storage.cli.program import add_cwd_to_path
from hicache_storage.cli.progress import shows_progress
from hicache_storage.cli.signal_stop import SignalStop
from hicache_storage.cli.sizes import size_from_zero
from hicache_storage.cli.stores import add_evict_argument, add_store_arguments, store_choice
from hicache_storage.cli.traces import (
    add_shape_arguments,
    add_trace_arguments,
    model_of,
    pools_of,
    positive_number,
    read_requests,
)
from hicache_storage.errors import ConfigError
from hicache_storage.replay.disruptions import Disruptions

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator, Sequence

    from rich.progress import Progress

    from hicache_storage.events.settings import EventSettings
    from hicache_storage.page_store.admission import AdmissionSettings
    from hicache_storage.replay.driver import ReplaySettings
    from hicache_storage.replay.trace import Request

logger: logging.Logger = logging.getLogger(__name__)

SUMMARY = "Replay a trace of requests through the cache and a storage, and verify every byte."

_PAGE_TOKENS = 64
_CORRUPT = 1
_MOST_REQUESTS = 10_000_000
_MOST_RANKS = 256
_MOST_REMEMBERED_PAGES = 1_000_000_000
_LAST_PORT = 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_store_arguments(parser, engine_flags_in_help=True)
    _add_trace_arguments(parser)
    _add_cache_arguments(parser)
    _add_admission_arguments(parser)
    _add_rank_arguments(parser)
    Disruptions.add_arguments(parser)
    _add_observer_arguments(parser)
    parser.add_argument(
        "--metrics-port",
        type=config.int_up_to(_LAST_PORT),
        metavar="PORT",
        help="serve metrics (docs/metrics.md) at 127.0.0.1:PORT during the run, rank n at PORT + n",
    )
    parser.add_argument(
        "--explain-log",
        metavar="FILE",
        help="add the reason for each request's missing pages to a file, for hicache explain",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep the pages of this run in the storage; otherwise they are removed at the end",
    )
    add_evict_argument(parser)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the figures to a file"
    )


def _add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    add = add_trace_arguments(parser, most_requests=_MOST_REQUESTS).add_argument
    add(
        "--speed",
        type=positive_number,
        metavar="X",
        help="X times real time, e.g. 10 or 0.5 (default: as fast as possible)",
    )


def _add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    add = add_shape_arguments(
        parser,
        scale="1/64",
        scale_help="make pages smaller, at most 16,384 times: 1/64, 0.015625 and 64 mean the same; 1 is"
        " real size (default: 1/64)",
    ).add_argument
    add(
        "--host-size",
        type=size_from_zero,
        default="128MiB",
        metavar="BYTES",
        help="size of L2, such as 2GiB, shared by all pools (default: %(default)s)",
    )
    add(
        "--checksum",
        choices=("xxh3", "none"),
        default="xxh3",
        help="checksum of pages in the storage (default: %(default)s)",
    )


def _add_admission_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("writes to the storage").add_argument
    add(
        "--second-use",
        action="store_true",
        help="write a page only when it is offered a second time",
    )
    add(
        "--remembered-pages",
        type=config.int_up_to(_MOST_REMEMBERED_PAGES),
        metavar="N",
        help="number of pages that --second-use remembers (default: 1,000,000)",
    )
    add(
        "--write-rate",
        type=size_from_zero,
        metavar="BYTES",
        help="on each rank, write at most this much per second of the trace's own time, such as 200MiB",
    )
    add(
        "--write-burst",
        type=size_from_zero,
        metavar="BYTES",
        help="write at most this much at once after a pause (default: ten seconds of --write-rate)",
    )


def _add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("ranks").add_argument
    add(
        "--ranks",
        type=config.int_up_to(_MOST_RANKS),
        default=1,
        metavar="N",
        help="tensor parallel ranks; each is a process with --host-size of L2 (default: 1)",
    )
    add(
        "--head-group",
        type=config.positive_int,
        metavar="HEADS",
        help="store this many KV heads in a page, so that runs with another number of --ranks find it",
    )


def _add_observer_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("traces and events").add_argument
    add(
        "--tracing",
        action="store_true",
        help="make OpenTelemetry spans for the tracer provider that opentelemetry-instrument sets up",
    )
    add(
        "--events-endpoint",
        metavar="ADDRESS",
        help='publish KV events over ZeroMQ: bind "tcp://*:5557", or connect to "tcp://router:5557"',
    )
    add(
        "--events-bind",
        action="store_true",
        help="bind --events-endpoint instead of connecting to it, for example tcp://127.0.0.1:5557",
    )
    add(
        "--events-replay-endpoint",
        metavar="ADDRESS",
        help='send past events again on request: bind "tcp://*:5558"',
    )


def run(arguments: argparse.Namespace) -> int:
    """Run a replay. Return 0, 1 for corrupt pages, or 128 plus the number of a signal that ended it."""
    choice = store_choice(arguments)
    check_outputs(arguments)
    requests = read_requests(arguments)
    settings = _settings(arguments, choice)
    if arguments.tracing:
        _warn_of_lost_spans()
    disruptions = Disruptions.from_arguments(arguments, len(requests))
    for storage in filter(None, (choice, disruptions.swap)):
        add_cwd_to_path(storage.backend, storage.config)
        if not arguments.evict:
            _require_free(storage, settings, requests)
    from hicache_storage.replay.job import ReplayJob, run_job  # noqa: PLC0415 - invalid flags fail fast
    from hicache_storage.replay.ranks import run_ranks  # noqa: PLC0415

    job = ReplayJob(
        choice, settings, disruptions, requests, arguments.metrics_port, keep=arguments.keep
    )
    with SignalStop() as stop, _progress() as progress:
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
        "scale_bytes": arguments.scale_bytes,
        "interrupted": stop.signal is not None,
        **figures,
    }
    from hicache_storage.replay.tables import tables  # noqa: PLC0415

    print_lines(output_console(), tables(report))
    write_outputs(arguments, report)
    if stop.signal is not None:
        return 128 + stop.signal
    return _CORRUPT if report["corrupt_pages"] else 0


def _require_free(
    choice: config.StorageChoice, settings: ReplaySettings, requests: Sequence[Request]
) -> None:
    """Refuse a trace whose pages the store has no free space for."""
    from hicache_storage.cli.operations.free_space import require_free, stored_nbytes  # noqa: PLC0415
    from hicache_storage.replay.driver import extent_of, rank_shape  # noqa: PLC0415
    from hicache_storage.replay.trace import BLOCK_TOKENS  # noqa: PLC0415

    blocks = len({place for request in requests for place in enumerate(request.blocks)})
    topology, tokens = settings.topology, settings.page_tokens
    sizes = [
        rank_shape(pool.shape, topology, rank).page(tokens).nbytes
        for pool in settings.pools
        for rank in range(topology.size)
        if (part := topology.part(extent_of(pool.shape), rank)) is not None and part.writes
    ]

    def needed_nbytes(alignment: int) -> int:
        pages = blocks * BLOCK_TOKENS // tokens
        return pages * sum(stored_nbytes(nbytes, alignment) for nbytes in sizes)

    advice = "replay fewer requests or smaller pages (--scale-bytes), or use an empty store"
    require_free("replay", choice, needed_nbytes, advice)


# --- flags to objects ------------------------------------------------------------------------------


def _settings(arguments: argparse.Namespace, choice: config.StorageChoice) -> ReplaySettings:
    from hicache_storage.replay.driver import ReplaySettings  # noqa: PLC0415
    from hicache_storage.request_log import ExplainLogSettings  # noqa: PLC0415
    from hicache_storage.topology import Grid, Topology  # noqa: PLC0415

    return ReplaySettings(
        model=choice.served_model_name or model_of(arguments),
        pools=pools_of(arguments),
        page_tokens=choice.page_tokens or _PAGE_TOKENS,
        layout=choice.mem_layout,
        host_nbytes=arguments.host_size,
        checksum=arguments.checksum,
        controller=choice.controller,
        admission=_admission(arguments),
        speed=arguments.speed,
        topology=Topology(tp_size=arguments.ranks),
        grid=Grid(head_group=arguments.head_group),
        request_log=ExplainLogSettings.parse(
            "replay", {"explain_log": arguments.explain_log or ""}
        ),
        events=_events(arguments),
        tracing=arguments.tracing,
    )


def _warn_of_lost_spans() -> None:
    try:
        from opentelemetry import trace  # noqa: PLC0415 - an extra, which the run asks for
    except ModuleNotFoundError:
        return
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        logger.warning(
            "--tracing: spans go nowhere, because this process has no OpenTelemetry SDK: start it with"
            " opentelemetry-instrument, of the package opentelemetry-distro"
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
        "bind": arguments.events_bind or None,
        "replay_endpoint": arguments.events_replay_endpoint,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if not given:
        return None
    if "endpoint" not in given:
        flag = "replay-endpoint" if "replay_endpoint" in given else "bind"
        raise ConfigError(f"--events-{flag} needs --events-endpoint")
    return EventSettings.parse("replay", given)


# --- terminal output -------------------------------------------------------------------------------


@contextmanager
def _progress() -> Generator[Progress, None, None]:
    """Show a progress bar on stderr if that is a terminal."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    console = Console(stderr=True)
    is_shown = console.is_terminal and shows_progress()
    with Progress(console=console, transient=True, disable=not is_shown) as progress:
        yield progress
