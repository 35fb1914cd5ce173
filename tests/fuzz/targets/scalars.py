"""Durations, sizes, numbers, flags and shares: a finite value in its range, or the documented error."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from fuzz.choices import CANARY, Choices

from hicache_storage.cli.ages import age
from hicache_storage.cli.sizes import format_nbytes, parse_share, share, size, size_from_zero
from hicache_storage.config import int_up_to, positive_int
from hicache_storage.durations import check_seconds, format_age, parse_seconds, with_unit
from hicache_storage.scalars import (
    MAX_INT64,
    check_integer,
    format_number,
    parse_bool,
    parse_float,
    parse_integer,
    parse_nbytes,
)

_OF_VALUES: tuple[tuple[Callable[[Any], Any], Callable[[Any], bool]], ...] = (
    (parse_seconds, math.isfinite),
    (parse_nbytes, lambda found: type(found) is int and 0 <= found <= MAX_INT64),
    (parse_integer, lambda found: type(found) is int and abs(found) <= MAX_INT64),
    (parse_float, lambda found: type(found) is float and math.isfinite(found)),
    (parse_bool, lambda found: isinstance(found, bool)),
)
_OF_TEXTS: tuple[tuple[Callable[[str], Any], Callable[[Any], bool]], ...] = (
    (with_unit, lambda found: found is None or 0 <= found < math.inf),
    (size, lambda found: 1 <= found <= MAX_INT64),
    (size_from_zero, lambda found: 0 <= found <= MAX_INT64),
    (share, lambda found: 0 < found <= 1),
    (parse_share, lambda found: found is None or 0 <= found < math.inf),
    (age, lambda found: 0 < found < math.inf),
    (positive_int, lambda found: found >= 1),
    (int_up_to(100), lambda found: 1 <= found <= 100),
)

SEEDS = (
    b"",
    *(
        bytes([n]) + text.encode()
        for n, text in enumerate(
            ("90s", "1.5h", "500ms", "1GiB", "1.5 GB", "400g", "30%", "1e-3", "-4")
        )
    ),
    *(bytes([255, n, 3]) + bytes([n] * 12) for n in range(6)),
)
TOKENS = tuple(
    text.encode()
    for text in (
        *(
            "ms",
            "s",
            "m",
            "h",
            "d",
            "w",
            "KiB",
            "GB",
            "e",
            "%",
            ".",
            "-",
            "+",
            "true",
            "FALSE",
            "1e999",
        ),
        *(
            "\u017f",
            "\u212a",
            "\u0131",
            "\u0130",
            "\u0663",
            "\u00a0",
            "9" * 24,
            "_",
            " ",
            "nan",
            "inf",
        ),
    )
)


def check(data: bytes) -> None:
    choices = Choices(data)
    if choices.integer(0, 255) == 255:
        value = choices.plain()
    else:
        value = choices.rest().decode("utf-8", "surrogateescape")
    for parse, is_right in _OF_VALUES:
        try:
            found = parse(value)
        except ValueError as error:
            assert CANARY not in str(error)
            continue
        assert is_right(found), parse
        again = parse(found)
        assert found == again
    if isinstance(value, str):
        _check_text(value)
    _check_given(value)


def _check_text(text: str) -> None:
    for parse, is_right in _OF_TEXTS:
        try:
            assert is_right(parse(text)), parse
        except argparse.ArgumentTypeError:
            continue


def _check_given(value: Any) -> None:
    """Assert that the checks of values from programs raise only TypeError or ValueError."""
    format_number(value)
    for call in (
        lambda: check_integer("n", value, least=0),
        lambda: check_seconds("n", value, zero=True),
    ):
        try:
            call()
        except (TypeError, ValueError):
            continue
        assert 0 <= value <= MAX_INT64
        assert format_nbytes(value)
        assert format_age(value)
