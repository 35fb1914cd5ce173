from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import space

from hicache_storage.host_pool import HostPool, PageShape
from hicache_storage.page_store import PageStoreSettings
from hicache_storage.page_store.lookup import PoolSpec
from hicache_storage.scalars import (
    MAX_INT64,
    check_integer,
    format_exact_nbytes,
    format_number,
    parse_nbytes,
)

SHAPE = PageShape.mla(page_tokens=1, layers=1, kv_dim=1, dtype="uint8")


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_an_integer_of_any_type_becomes_a_plain_one(value: Any) -> None:
    assert check_integer("n", value, least=3) == 3
    assert type(check_integer("n", value, least=0)) is int


@pytest.mark.parametrize("value", [True, np.bool_(0), 3.0, "3", None, [3]])
def test_a_value_that_is_no_integer_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match="n must be an integer, not"):
        check_integer("n", value, least=0)


def test_the_ends_of_the_range_are_in_it() -> None:
    assert check_integer("n", -2, least=-2) == -2
    assert check_integer("n", MAX_INT64, least=0) == MAX_INT64
    with pytest.raises(ValueError, match="n must be at least 4, not 3"):
        check_integer("n", 3, least=4)
    with pytest.raises(ValueError, match=f"n must be at most {MAX_INT64}, not a number of 64 bits"):
        check_integer("n", MAX_INT64 + 1, least=4)


def test_a_number_that_python_would_not_write_is_shown_by_its_bits() -> None:
    assert ["7", "1.5", "a number of 16610 bits"] == [format_number(n) for n in (7, 1.5, 10**5000)]


@pytest.mark.parametrize("value", [True, 1.0, "1", 0])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (PageStoreSettings, "parallelism"),
        (PageStoreSettings, "breaker_failures"),
        (partial(HostPool, SHAPE), "slots"),
        (partial(PageShape.mla, page_tokens=1, kv_dim=1, dtype="uint8"), "layers"),
        (partial(PageShape.mla, layers=1, kv_dim=1, dtype="uint8"), "page_tokens"),
        (partial(PoolSpec, space=space()), "window_pages"),
    ],
)
def test_a_count_or_a_size_is_a_whole_number_wherever_it_is_set(
    make: Callable[..., object], name: str, value: Any
) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"{name} must be"):
        make(**{name: value})


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (12, 12),
        (12.0, 12),
        ("12", 12),
        (" 12 B ", 12),
        ("64KiB", 64 << 10),
        ("1GB", 10**9),
        ("1.5 GiB", 3 << 29),
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
            "1G",
            "1Gi",
            "400g",
            "24Mb",
            "64 kib",
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
            "1K\u0131B",
            "1\u212aB",
        ),
        *(True, False, None, 1.5, float("inf"), float("nan"), -1, 2**63, [1], b"12", "9" * 400),
    ],
)
def test_any_other_size_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match=r"size|bytes"):
        parse_nbytes(written)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(999, "999 B"), (1 << 20, "1 MiB"), ((1 << 20) + 64, "1.00 MiB (1,048,640 bytes)")],
)
def test_sizes_that_differ_in_a_few_bytes_are_told_apart(nbytes: int, text: str) -> None:
    assert text == format_exact_nbytes(nbytes)


def test_a_message_about_a_size_lists_every_unit_that_is_one() -> None:
    with pytest.raises(ValueError, match="units") as refused:
        parse_nbytes("1 G")
    listed = str(refused.value).partition("the units are ")[2]
    for unit in listed.replace(" and ", ", ").split(", "):
        assert parse_nbytes(f"1{unit}") >= 1


def test_a_share_is_refused_as_a_share() -> None:
    with pytest.raises(ValueError, match="a share is not a size"):
        parse_nbytes("80 %")


@settings(deadline=None)  # The machine may be busy.
@given(st.text())
def test_the_text_of_a_size_is_read_whole_or_refused(text: str) -> None:
    try:
        nbytes = parse_nbytes(text)
    except ValueError:
        return

    assert text.strip()[0].isdigit()
    assert nbytes >= 0
