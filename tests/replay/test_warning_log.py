"""The warnings of a run: each change of state is shown, but no warning twice."""

from __future__ import annotations

import logging

import pytest

from hicache_storage.replay.warning_log import RepeatFilter


def record(message: str, logger: str = "store") -> logging.LogRecord:
    return logging.LogRecord(logger, logging.WARNING, __file__, 1, message, (), None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose only item is the time that the test sets."""
    now_s = [100.0]
    monkeypatch.setattr("hicache_storage.replay.warning_log.time.monotonic", lambda: now_s[0])
    return now_s


def test_a_repeated_warning_is_shown_once(clock: list[float]) -> None:
    repeats = RepeatFilter()
    shown: list[bool] = []
    for _ in range(3):
        shown.append(repeats.filter(record("a call failed")))
        clock[0] += 2

    assert shown == [True, False, False]


def test_a_lasting_warning_is_shown_again_later(clock: list[float]) -> None:
    repeats = RepeatFilter()
    repeats.filter(record("a call failed"))
    clock[0] += 31

    assert repeats.filter(record("a call failed"))


def test_each_change_of_state_is_shown(clock: list[float]) -> None:
    repeats = RepeatFilter()
    shown: list[bool] = []
    for message in ("full", "takes pages again", "full", "takes pages again"):
        shown.append(repeats.filter(record(message)))
        clock[0] += 2

    assert shown == [True] * 4


def test_a_state_that_flickers_is_not_a_flood(clock: list[float]) -> None:
    repeats = RepeatFilter()
    shown = sum(repeats.filter(record(message)) for message in ["full", "free"] * 1000)

    assert (shown, clock) == (2, [100.0])


def test_each_logger_has_its_own_latest_message(clock: list[float]) -> None:
    repeats = RepeatFilter()
    repeats.filter(record("full"))
    clock[0] += 2
    repeats.filter(record("something else", "controller"))

    assert not repeats.filter(record("full"))
