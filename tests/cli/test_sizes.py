"""Sizes and shares, as the verbs read and show them."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from hicache_storage.cli.sizes import format_nbytes, share, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1000 B"),
        (1024, "1 KiB"),
        (12_345, "12.1 KiB"),
        (1_048_300, "1.00 MiB"),
        (123_456_789, "118 MiB"),
        (5 << 50, "5 PiB"),
    ],
)
def test_a_size_is_shown_in_the_units_that_people_set(nbytes: int, text: str) -> None:
    assert text == format_nbytes(nbytes)


def test_a_size_is_at_least_one_byte() -> None:
    assert size("1KiB") == 1024
    with pytest.raises(ArgumentTypeError, match="at least one byte"):
        size("0")


@pytest.mark.parametrize(("text", "value"), [("1%", 0.01), ("0.25", 0.25), ("100%", 1)])
def test_a_share_is_a_percentage_or_a_fraction(text: str, value: float) -> None:
    assert value == pytest.approx(share(text))


@pytest.mark.parametrize("text", ["", "0", "101%", "2", "%", "x", "-1%"])
def test_no_other_text_is_a_share(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="must be a share"):
        share(text)
