"""Flags for a trace and its model, shared by `plan` and `replay`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_storage import config
from hicache_storage.errors import ConfigError, shown
from hicache_storage.replay.models import (
    PRESETS,
    PoolShape,
    check_pools,
    parse_number,
    parse_pool,
    parse_scale,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.replay.trace import Request

_CONVERSATIONS = 75
_MOST_CONVERSATIONS = 1_000_000
_SEED = re.compile(r"-?[0-9]{1,18}")


def add_trace_arguments(parser: argparse.ArgumentParser, *, most_requests: int) -> Any:
    """Add flags for a trace file or a synthetic trace. Return the argument group, for more flags."""
    group = parser.add_argument_group("trace")
    add = group.add_argument
    add(
        "--trace",
        type=Path,
        metavar="FILE[.gz]",
        help="a trace in the Mooncake format (default: a synthetic one)",
    )
    add(
        "--requests",
        type=config.int_up_to(most_requests),
        metavar="N",
        help="stop after the first N requests of the trace",
    )
    add("--seed", type=_seed, metavar="N", help="seed of the synthetic trace (default: 0)")
    add(
        "--conversations",
        type=config.int_up_to(_MOST_CONVERSATIONS),
        metavar="N",
        help=f"conversations in the synthetic trace (default: {_CONVERSATIONS}, or more if --requests"
        " needs more)",
    )
    return group


def read_requests(arguments: argparse.Namespace) -> Sequence[Request]:
    """Return the requests of the trace that the flags name.

    Raises:
        ConfigError: The trace cannot be read, or flags of the synthetic trace are given as well.
    """
    from hicache_storage.replay.trace import read_trace, synthetic_trace  # noqa: PLC0415 - `--help` stays fast

    if arguments.trace is not None:
        for name in ("seed", "conversations"):
            if getattr(arguments, name) is not None:
                raise ConfigError(
                    f"--{name} is for the synthetic trace: leave out --{name} or --trace"
                )
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


def add_shape_arguments(parser: argparse.ArgumentParser, *, scale: str, scale_help: str) -> Any:
    """Add flags for the shapes of pools. Return the argument group, for more flags."""
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
        help="instead of --model, once for each pool: kv:mha,layers=32,heads=8,dim=128,dtype=bfloat16"
        " draft:mla,layers=1,dim=576",
    )
    group.add_argument(
        "--scale-bytes", type=_scale, default=scale, metavar="FACTOR", help=scale_help
    )
    return group


def model_of(arguments: argparse.Namespace) -> str:
    """Return the name of the model whose shapes the flags choose."""
    return "custom" if arguments.pool else PRESETS[arguments.model].model


def pools_of(arguments: argparse.Namespace) -> tuple[PoolShape, ...]:
    """Return the pools that the flags choose, scaled, with the target first.

    Raises:
        ConfigError: A `--pool` is wrong, or the target's is missing.
    """
    given = [parse_pool(text) for text in arguments.pool or ()]
    pools = check_pools(given or PRESETS[arguments.model].pools)
    return tuple(PoolShape(pool.name, pool.shape.scaled(arguments.scale_bytes)) for pool in pools)


def positive_number(text: str) -> float:
    """Parse a number above 0. Usable as an argparse type."""
    value = parse_number(text)
    if not value:
        raise argparse.ArgumentTypeError(f"must be a number greater than 0, not {shown(text)!r}")
    return value


def number_from_zero(text: str) -> float:
    """Parse a number that is 0 or more. Usable as an argparse type."""
    value = parse_number(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"must be a number, 0 or more, not {shown(text)!r}")
    return value


def _seed(text: str) -> int:
    if _SEED.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {shown(text)!r}")
    return int(text)


def _scale(text: str) -> float:
    try:
        return parse_scale(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
