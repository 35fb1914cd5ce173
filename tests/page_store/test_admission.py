"""Admission of writes: only at the second use, and within a rate of bytes."""

from __future__ import annotations

import pytest
from pages import hash_of

from hicache_storage.errors import ConfigError
from hicache_storage.page_store.admission import (
    NOT_ADMITTED_FIRST_USE,
    NOT_ADMITTED_RATE,
    Admission,
    AdmissionSettings,
)

PAGES = [hash_of(number) for number in range(10)]


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def limited(rate: int, burst: int | None, clock: _Clock, *, second_use: bool = False) -> Admission:
    settings = AdmissionSettings(
        second_use=second_use, write_nbytes_per_s=rate, write_burst_nbytes=burst
    )
    return Admission(settings, clock=clock)


def test_by_default_every_page_is_admitted() -> None:
    admission = Admission(AdmissionSettings())

    assert not admission.settings.is_enabled
    assert [True] * 10 == admission.admit(PAGES, 4096)
    assert {} == admission.stats()


def test_a_page_is_admitted_at_its_second_use() -> None:
    admission = Admission(AdmissionSettings(second_use=True))

    assert [False] * 3 == admission.admit(PAGES[:3], 4096)
    assert [True] * 3 + [False] == admission.admit(PAGES[:4], 4096)
    assert {NOT_ADMITTED_FIRST_USE: 4} == admission.stats()


def test_a_page_that_was_used_before_is_admitted_at_once() -> None:
    admission = Admission(AdmissionSettings(second_use=True))

    assert [False, True, False] == admission.admit(PAGES[:3], 1, used=[False, True, False])
    assert {NOT_ADMITTED_FIRST_USE: 2} == admission.stats()


def test_equal_hashes_of_different_groups_are_different_pages() -> None:
    admission = Admission(AdmissionSettings(second_use=True))
    admission.admit(PAGES, 1, group="kv")

    assert [False] * 10 == admission.admit(PAGES, 1, group="draft")


def test_the_first_pages_get_the_bytes_of_the_rate() -> None:
    clock = _Clock()
    admission = limited(1000, 3500, clock)

    assert [True] * 3 + [False] * 7 == admission.admit(PAGES, 1000)
    clock.now_s += 1.5  # 500 + 1500
    assert [True] * 2 + [False] * 8 == admission.admit(PAGES, 1000)
    assert {NOT_ADMITTED_RATE: 15} == admission.stats()


def test_a_pause_saves_no_more_than_the_burst() -> None:
    clock = _Clock()
    admission = limited(1000, 2000, clock)
    clock.now_s += 1000

    assert 2 == admission.admit(PAGES, 1000).count(True)


def test_the_burst_is_ten_seconds_by_default() -> None:
    assert 10 == limited(1000, None, _Clock()).admit(PAGES * 2, 1000).count(True)


def test_a_page_larger_than_the_burst_waits_for_a_full_bucket() -> None:
    clock = _Clock()
    admission = limited(1000, 2000, clock)
    admitted: list[float] = []
    for eighth in range(80):
        clock.now_s = eighth / 8
        if admission.admit(PAGES[:1], 4000)[0]:
            admitted.append(clock.now_s)

    assert [0, 4, 8] == admitted


def test_a_page_at_its_first_use_takes_nothing_of_the_rate() -> None:
    admission = limited(1000, 2000, _Clock(), second_use=True)
    admission.admit(PAGES[:5], 1000)

    assert [False] * 5 + [True] * 2 + [False] * 3 == admission.admit(PAGES[5:] + PAGES[:5], 1000)
    assert {NOT_ADMITTED_FIRST_USE: 10, NOT_ADMITTED_RATE: 3} == admission.stats()


@pytest.mark.parametrize(
    "field",
    [
        {"remembered_pages": 1},
        {"write_nbytes_per_s": 0},
        {"write_burst_nbytes": "-1"},
        {"second_use": "perhaps"},
        {"third_use": True},
    ],
    ids=lambda field: next(iter(field)),
)
def test_a_wrong_field_is_named(field: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(field))):
        AdmissionSettings.parse("admission", field)
