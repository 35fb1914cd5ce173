from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pages import space

from hicache_storage.host_pool import HostPool, PageShape
from hicache_storage.page_store import PageStoreSettings
from hicache_storage.page_store.hit_policy import PoolSpec
from hicache_storage.whole_numbers import MOST, check_whole, shown

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = PageShape.mla(page_tokens=1, layers=1, kv_dim=1, dtype="uint8")


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_an_integer_of_any_type_becomes_a_plain_one(value: Any) -> None:
    assert check_whole("n", value, least=3) == 3
    assert type(check_whole("n", value, least=0)) is int


@pytest.mark.parametrize("value", [True, np.bool_(0), 3.0, "3", None, [3]])
def test_what_is_no_integer_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match="n must be an integer, not"):
        check_whole("n", value, least=0)


def test_the_ends_of_the_range_are_in_it() -> None:
    assert check_whole("n", -2, least=-2) == -2
    assert check_whole("n", MOST, least=0) == MOST
    with pytest.raises(ValueError, match="n must be at least 4, not 3"):
        check_whole("n", 3, least=4)
    with pytest.raises(ValueError, match=f"n must be at most {MOST}, not a number of 64 bits"):
        check_whole("n", MOST + 1, least=4)


def test_a_number_that_python_would_not_write_has_its_bits_told() -> None:
    assert ["7", "1.5", "a number of 16610 bits"] == [shown(n) for n in (7, 1.5, 10**5000)]


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
