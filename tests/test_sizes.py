"""hicache_storage.sizes"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_storage.sizes import parse_nbytes


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (12, 12),
        (12.0, 12),
        ("12", 12),
        (" 12 b ", 12),
        ("64KiB", 64 << 10),
        ("64 kib", 64 << 10),
        ("64Ki", 64 << 10),
        ("1GB", 10**9),
        ("1.5 GiB", 3 << 29),
        ("400g", 400 * 10**9),
        ("2TiB", 2 << 40),
        ("1PB", 10**15),
        ("1EiB", 1 << 60),
        ("0", 0),
    ],
)
def test_a_size_is_a_number_with_an_optional_unit(written: object, nbytes: int) -> None:
    assert nbytes == parse_nbytes(written)


@pytest.mark.parametrize(
    "written",
    [
        *(
            "80%",
            "1,000GB",
            "1_000",
            "10.5.5GB",
            "10 g i b",
            "100G/rank",
            "1e9",
            "+5",
            "-5",
            "0x10",
        ),
        *(
            "",
            " ",
            "GB",
            ".5GB",
            "5.GB",
            "1.5",
            "1.5B",
            "10  GB",
            "10 Gbit",
            "١٢",
            "12\n13",
            "8EiB",
        ),
        *(True, False, None, 1.5, float("inf"), float("nan"), -1, 2**63, [1], b"12", "9" * 400),
    ],
)
def test_anything_else_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_nbytes(written)


def test_a_share_is_named_as_such() -> None:
    with pytest.raises(ValueError, match="a share is no size"):
        parse_nbytes("80 %")


@given(st.text())
def test_text_is_read_whole_or_refused(text: str) -> None:
    try:
        nbytes = parse_nbytes(text)
    except ValueError:
        return

    assert text.strip()[0].isdigit()
    assert nbytes >= 0
