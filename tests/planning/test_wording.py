"""Figures in words."""

from __future__ import annotations

from hicache_storage.planning.wording import amount, duration, option_name, percent, size


def test_sizes_have_three_digits_or_so() -> None:
    assert ["none", "512 B", "1 KiB", "1.25 GiB", "12.5 GiB", "357 GiB"] == [
        size(0),
        size(512),
        size(1024),
        size(1.25 * (1 << 30)),
        size(12.5 * (1 << 30)),
        size(357.4 * (1 << 30)),
    ]


def test_shares_amounts_and_durations() -> None:
    assert "36.6 %" == percent(0.366)
    assert ["", "-1,234", "9.50"] == [amount(None), amount(-1234.4), amount(9.5)]
    assert ["59.0 min", "2.0 h", "3.0 days", "1.5 s"] == [
        duration(each) for each in (3540, 7200, 259200, 1.5)
    ]


def test_an_option_is_named_by_its_sizes() -> None:
    both = {"host_nbytes": 1 << 38, "storage_nbytes": 1 << 42}

    assert "L2 of 256 GiB, L3 of 4 TiB" == option_name(both)
    assert "L2 of 256 GiB, no L3" == option_name(both | {"storage_nbytes": 0})
