"""`hicache plan`: from a trace to the sizes of L2 and L3 that pay, without moving a page."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_storage import config
from hicache_storage.controller_settings import WritePolicy
from hicache_storage.errors import ConfigError
from hicache_storage.replay.models import (
    PRESETS,
    PoolShape,
    check_pools,
    parse_number,
    parse_pool,
    parse_scale,
)
from hicache_storage.scalars import parse_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.planning.settings import PlanSettings
    from hicache_storage.replay.trace import Request

SUMMARY = "Tell from a trace how much L2 and L3 pay: hits, bandwidth, GPU time and money."

_PAGE_TOKENS = 64
_CONVERSATIONS = 75
_MOST = 10_000_000_000
_MOST_CONVERSATIONS = 1_000_000
_SEED = re.compile(r"-?[0-9]{1,18}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags. Those that `hicache replay` has, too, mean the same."""
    add = parser.add_argument_group("trace").add_argument
    add(
        "--trace", type=Path, metavar="FILE[.gz]", help="in the Mooncake format; default: synthetic"
    )
    add(
        "--requests",
        type=config.int_up_to(_MOST),
        metavar="N",
        help="stop after the first N requests of the trace",
    )
    add("--seed", type=_seed, metavar="N", help="of the synthetic trace (default: 0)")
    add(
        "--conversations",
        type=config.int_up_to(_MOST_CONVERSATIONS),
        metavar="N",
        help=f"in the synthetic trace (default: {_CONVERSATIONS})",
    )
    add(
        "--sample-above",
        type=config.int_up_to(_MOST),
        metavar="PAGES",
        help="analyse a sample of about so many accesses to pages where the trace has more"
        " (default: 10 million)",
    )
    _add_cache_arguments(parser)
    _add_price_arguments(parser)
    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE", help="write the figures to a file, too")
    add("--html", type=Path, metavar="FILE", help="write a page with plots to a file, too")


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
        help="instead of --model, once a pool: kv:mha,layers=32,heads=8,dim=128,dtype=bfloat16",
    )
    add = group.add_argument
    add(
        "--scale-bytes",
        type=_type_of(parse_scale),
        default="1",
        metavar="FACTOR",
        help="make pages smaller, as a replay does, e.g. 1/64 (default: 1, real size)",
    )
    add(
        "--page-size",
        type=config.positive_int,
        default=_PAGE_TOKENS,
        metavar="TOKENS",
        help="tokens in a page (default: %(default)s)",
    )
    add(
        "--host-size",
        type=_type_of(parse_nbytes),
        action="append",
        metavar="BYTES",
        help="a size of L2 to compare, e.g. 256GiB, of all ranks together; may be given several times"
        " (default: sizes that fit the trace)",
    )
    add(
        "--storage-size",
        type=_type_of(parse_nbytes),
        action="append",
        metavar="BYTES",
        help="a size of L3 to compare, e.g. 4TiB, or 0 for no L3; may be given several times",
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
        type=_positive,
        metavar="TOKENS",
        help="prompt tokens that one GPU computes in a second: needed for GPU time and money",
    )
    add("--gpu-price", type=_positive, metavar="X", help="of a GPU for an hour")
    add("--host-price", type=_amount, default=0.0, metavar="X", help="of a GiB of L2 for a month")
    add(
        "--storage-price", type=_amount, default=0.0, metavar="X", help="of a GiB of L3 for a month"
    )
    add(
        "--busy-hours",
        type=_positive,
        default=730.0,
        metavar="HOURS",
        help="hours of a month with a load like the trace's (default: all 730)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, write the files that are asked for, and return 0."""
    for flag in ("json", "html"):
        _check_output(flag, getattr(arguments, flag))
    if arguments.gpu_price is not None and arguments.prefill_rate is None:
        raise ConfigError("--gpu-price needs --prefill-rate: money is GPU time that hits save")
    settings = _settings(arguments)
    from hicache_storage.planning.plan import make_plan  # noqa: PLC0415 - invalid flags fail fast

    report = {
        "trace": str(arguments.trace or "synthetic"),
        **make_plan(_requests(arguments), settings),
    }
    _publish(report, arguments)
    return 0


def _requests(arguments: argparse.Namespace) -> Sequence[Request]:
    from hicache_storage.replay.trace import read_trace, synthetic_trace  # noqa: PLC0415

    if arguments.trace is None:
        return synthetic_trace(
            arguments.seed or 0,
            conversations=arguments.conversations or _CONVERSATIONS,
            limit=arguments.requests,
        )
    for name in ("seed", "conversations"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} is for the synthetic trace: leave it or --trace out")
    requests = read_trace(arguments.trace, arguments.requests)
    if not any(request.blocks for request in requests):
        raise ConfigError(f"{arguments.trace}: no request has a prompt")
    return requests


def _settings(arguments: argparse.Namespace) -> PlanSettings:
    from hicache_storage.planning.settings import (  # noqa: PLC0415 - keeps `hicache --help` fast
        MAX_PAGES,
        PlanSettings,
        Prices,
    )

    preset = PRESETS[arguments.model]
    pools = check_pools([parse_pool(text) for text in arguments.pool or ()] or preset.pools)
    return PlanSettings(
        model="custom" if arguments.pool else preset.model,
        pools=tuple(
            PoolShape(pool.name, pool.shape.scaled(arguments.scale_bytes)) for pool in pools
        ),
        page_tokens=arguments.page_size,
        host_sizes=tuple(dict.fromkeys(arguments.host_size or ())),
        storage_sizes=tuple(dict.fromkeys(arguments.storage_size or ())),
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


def _type_of(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return an argparse type that has the messages of `parse`."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return parsed


def _seed(text: str) -> int:
    if _SEED.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}")
    return int(text)


def _positive(text: str) -> float:
    value = parse_number(text)
    if not value:
        raise argparse.ArgumentTypeError(f"must be a number greater than 0, not {text!r}")
    return value


def _amount(text: str) -> float:
    value = parse_number(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"must be a number from 0 on, not {text!r}")
    return value


def _check_output(flag: str, path: Path | None) -> None:
    """Refuse an unwritable file before the analysis rather than after it."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--{flag} {path}: is a directory, not a file")
    if not path.parent.is_dir():
        raise ConfigError(f"--{flag} {path}: there is no directory {path.parent}")


def _publish(report: dict[str, Any], arguments: argparse.Namespace) -> None:
    from hicache_storage.cli.printing import output_console, print_lines  # noqa: PLC0415
    from hicache_storage.planning.page import html_page  # noqa: PLC0415
    from hicache_storage.planning.tables import tables  # noqa: PLC0415

    print_lines(output_console(), tables(report))
    if arguments.json is not None:
        _write("json", arguments.json, json.dumps(report, indent=2) + "\n")
    if arguments.html is not None:
        _write("html", arguments.html, html_page(report))


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--{flag} {path}: cannot be written: {error.strerror}") from None
