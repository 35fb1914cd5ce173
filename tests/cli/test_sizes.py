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
        (1000, "1.00 KB"),
        (12_345, "12.3 KB"),
        (999_600, "1.00 MB"),
        (123_456_789, "123 MB"),
        (5 * 10**15, "5.00 PB"),
    ],
)
def test_a_size_has_three_digits(nbytes: int, text: str) -> None:
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
