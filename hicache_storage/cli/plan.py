"""`hicache plan`: find the sizes of L2 and L3 that are worth their cost, without moving a page."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hicache_storage import config
from hicache_storage.cli.output_files import add_output_arguments, check_outputs, write_outputs
from hicache_storage.cli.printing import output_console, print_lines
from hicache_storage.cli.sizes import size, size_from_zero
from hicache_storage.cli.traces import (
    add_shape_arguments,
    add_trace_arguments,
    model_of,
    number_from_zero,
    pools_of,
    positive_number,
    read_requests,
)
from hicache_storage.controller_settings import WritePolicy
from hicache_storage.errors import ConfigError, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.planning.settings import PlanSettings
    from hicache_storage.replay.trace import Request

SUMMARY = "Show from a trace what L2 and L3 are worth: hits, bandwidth, GPU time and money."

_PAGE_TOKENS = 64
_MOST = 10_000_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags. Flags that `hicache replay` also has mean the same."""
    add = add_trace_arguments(parser, most_requests=_MOST).add_argument
    add(
        "--sample-above",
        type=config.int_up_to(_MOST),
        metavar="PAGES",
        help="if the trace accesses more pages than this, analyze a sample of about this many accesses"
        " (default: 10 million)",
    )
    _add_cache_arguments(parser)
    _add_price_arguments(parser)
    add_output_arguments(parser)


def _add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    add = add_shape_arguments(
        parser,
        scale="1",
        scale_help="make pages smaller, as a replay does, e.g. 1/64 (default: 1, real size)",
    ).add_argument
    add(
        "--page-size",
        type=config.positive_int,
        default=_PAGE_TOKENS,
        metavar="TOKENS",
        help="tokens in a page (default: %(default)s)",
    )
    add(
        "--host-size",
        type=size_from_zero,
        action="append",
        metavar="BYTES",
        help="a size of L2 to compare, e.g. 256GiB, of all ranks together; may be given several times"
        " (default: sizes that fit the trace)",
    )
    add(
        "--storage-size",
        type=size_from_zero,
        action="append",
        metavar="BYTES",
        help="a size of L3 to compare, e.g. 4TiB, or 0 for no L3; may be given several times",
    )
    add(
        "--tier",
        type=_tier,
        action="append",
        metavar="NAME=BYTES",
        help="a tier of L3 and its size, e.g. nvme=4TiB, the fastest first; give it for each tier to see"
        " the share of hits that each serves",
    )
    add(
        "--hicache-write-policy",
        choices=[policy.value for policy in WritePolicy],
        default=WritePolicy.WRITE_THROUGH.value,
        help="when a page is written to the storage (default: %(default)s)",
    )


def _add_price_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prices, in one currency").add_argument
    add(
        "--prefill-rate",
        type=positive_number,
        metavar="TOKENS",
        help="prompt tokens that one GPU computes in a second; needed for GPU time and money",
    )
    add("--gpu-price", type=positive_number, metavar="X", help="price of a GPU for an hour")
    add(
        "--host-price",
        type=number_from_zero,
        default=0.0,
        metavar="X",
        help="price of a GiB of L2 for a month",
    )
    add(
        "--storage-price",
        type=number_from_zero,
        default=0.0,
        metavar="X",
        help="price of a GiB of L3 for a month",
    )
    add(
        "--busy-hours",
        type=positive_number,
        default=730.0,
        metavar="HOURS",
        help="hours per month with a load like the trace's (default: all 730)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, write the files that were asked for, and return 0."""
    check_outputs(arguments)
    if arguments.gpu_price is not None and arguments.prefill_rate is None:
        raise ConfigError(
            "--gpu-price needs --prefill-rate, because the money comes from the GPU time that"
            " hits save"
        )
    settings = _settings(arguments)
    from hicache_storage.planning.plan import make_plan  # noqa: PLC0415 - invalid flags fail fast

    report = {
        "trace": str(arguments.trace or "synthetic"),
        **make_plan(_requests(arguments), settings),
    }
    from hicache_storage.planning.html_report import html_page  # noqa: PLC0415 - as above
    from hicache_storage.planning.tables import tables  # noqa: PLC0415

    print_lines(output_console(), tables(report))
    write_outputs(arguments, report, lambda: html_page(report))
    return 0


def _requests(arguments: argparse.Namespace) -> Sequence[Request]:
    requests = read_requests(arguments)
    if not any(request.blocks for request in requests):
        raise ConfigError(f"{arguments.trace}: no request has a prompt")
    return requests


def _tier(text: str) -> tuple[str, int]:
    """Parse `nvme=4TiB`. Usable as an argparse type."""
    name, equals, nbytes = text.partition("=")
    if not (equals and name):
        raise argparse.ArgumentTypeError(f"must be a tier such as nvme=4TiB, not {shown(text)!r}")
    return name, size(nbytes)


def _settings(arguments: argparse.Namespace) -> PlanSettings:
    from hicache_storage.planning.settings import (  # noqa: PLC0415 - keeps `hicache --help` fast
        MAX_PAGES,
        PlanSettings,
        Prices,
    )

    tiers: dict[str, int] = dict(arguments.tier or ())
    if len(tiers) < len(arguments.tier or ()):
        raise ConfigError("--tier: two tiers have the same name: give each one of its own")
    return PlanSettings(
        model=model_of(arguments),
        pools=pools_of(arguments),
        page_tokens=arguments.page_size,
        host_sizes=tuple(dict.fromkeys(arguments.host_size or ())),
        storage_sizes=tuple(dict.fromkeys([*(arguments.storage_size or ()), *tiers.values()])),
        tiers=tuple(tiers.items()),
        write_policy=WritePolicy(arguments.hicache_write_policy),
        prices=Prices(
            prefill_tokens_per_s=arguments.prefill_rate,
            gpu_hour=arguments.gpu_price,
            host_gib_month=arguments.host_price,
            storage_gib_month=arguments.storage_price,
            busy_hours_per_month=arguments.busy_hours,
        ),
        max_pages=arguments.sample_above or MAX_PAGES,
    )
