"""What of a run's warnings is shown."""

from __future__ import annotations

import logging

import pytest

from hicache_storage.replay.repeats import WithoutRepeats


def record(message: str, logger: str = "store") -> logging.LogRecord:
    return logging.LogRecord(logger, logging.WARNING, __file__, 1, message, (), None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its only item is the time."""
    now_s = [100.0]
    monkeypatch.setattr("hicache_storage.replay.repeats.time.monotonic", lambda: now_s[0])
    return now_s


def test_the_same_complaint_over_and_over_is_shown_once(clock: list[float]) -> None:
    shown = WithoutRepeats()
    seen: list[bool] = []
    for _ in range(3):
        seen.append(shown.filter(record("a call failed")))
        clock[0] += 2

    assert seen == [True, False, False]


def test_a_complaint_that_lasts_is_shown_again_later(clock: list[float]) -> None:
    shown = WithoutRepeats()
    shown.filter(record("a call failed"))
    clock[0] += 31

    assert shown.filter(record("a call failed"))


def test_each_change_of_state_is_shown(clock: list[float]) -> None:
    shown = WithoutRepeats()
    seen: list[bool] = []
    for message in ("full", "takes pages again", "full", "takes pages again"):
        seen.append(shown.filter(record(message)))
        clock[0] += 2

    assert seen == [True] * 4


def test_a_state_that_flickers_is_not_a_flood(clock: list[float]) -> None:
    shown = WithoutRepeats()
    seen = sum(shown.filter(record(message)) for message in ["full", "free"] * 1000)

    assert (seen, clock) == (2, [100.0])


def test_another_logger_has_words_of_its_own(clock: list[float]) -> None:
    shown = WithoutRepeats()
    shown.filter(record("full"))
    clock[0] += 2
    shown.filter(record("something else", "controller"))

    assert not shown.filter(record("full"))
