from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import pytest
from clocks import Clock
from framed import HASHES, TARGET, empty, filled, transfer
from stores import HookedStorage, failing

from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.page_store import PageStore, PageStoreSettings
from hicache_storage.page_store.lookup import PoolSpec
from hicache_storage.page_store.results import Verdict
from hicache_storage.page_store.state_log import StateLog


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Log:
    """The logged state of a store, and the log lines that it causes."""

    def __init__(self, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
        self._clock = clock
        self._caplog = caplog
        self._state = StateLog("reads from Acme", logging.getLogger("test"))

    def note(self, pages: Mapping[Verdict, int], *, after_s: float = 0.0) -> list[str]:
        """Record a short call that ends `after_s` later, and return its log lines."""
        self._caplog.clear()
        self._clock.now_s += after_s
        began_s = self._clock.now_s
        self._clock.now_s += 0.001
        self._state.note(pages, began_s)
        return [record.message for record in self._caplog.records]


@pytest.fixture
def log(clock: Clock, caplog: pytest.LogCaptureFixture) -> Log:
    return Log(clock, caplog)


OK = {Verdict.OK: 4, Verdict.MISS: 4}
DOWN = {Verdict.UNAVAILABLE: 8}
FULL = {Verdict.OK: 5, Verdict.REFUSED: 3}
LEFT_ALONE = "keeps failing, so it gets no calls for a while"
OPEN = {Verdict.BREAKER_OPEN: 8}


def test_hits_and_misses_are_not_logged(log: Log) -> None:
    assert not log.note(OK)
    assert not log.note({})
    assert not log.note({Verdict.CORRUPT: 1})


def test_failures_are_logged_when_they_begin_worsen_and_end(log: Log) -> None:
    assert log.note(DOWN) == [
        "reads from Acme: the store is unavailable; pages in the last 0.1 s: 8 unavailable"
    ]
    assert not log.note(DOWN, after_s=5)
    (grown,) = log.note(OPEN, after_s=5)
    assert grown.endswith(
        "no calls for a while; pages in the last 10.0 s: 16 unavailable, 8 not tried"
    )
    (over,) = log.note(OK, after_s=30)
    assert over.endswith(
        "the store is back to normal; pages in the last 40.0 s: 16 unavailable, 8 not tried"
    )
    assert not log.note(OK)


def test_lasting_failures_are_logged_at_growing_intervals(log: Log) -> None:
    lines = [bool(log.note(DOWN, after_s=10)) for _ in range(200)]

    assert [0, 6, 18, 42, 90, 186] == [number for number, told in enumerate(lines) if told]


def test_recurring_failures_are_logged_at_growing_intervals(log: Log) -> None:
    lines = sum(
        len(log.note(FULL, after_s=0.05)) + len(log.note(OK, after_s=0.05)) for _ in range(36000)
    )

    assert lines < 2 * 3600 / 50


def test_failures_that_were_not_logged_are_counted_in_the_next_line(log: Log) -> None:
    log.note(FULL)
    log.note(OK)
    assert not log.note(FULL)
    assert not log.note(OK)

    (line,) = log.note(FULL, after_s=2)

    assert line.endswith("6 refused")


def test_a_long_time_without_failures_resets_the_interval(log: Log) -> None:
    for _ in range(2):
        log.note(FULL)
        log.note(OK)

    (line,) = log.note(FULL, after_s=3600)

    assert line.endswith("pages in the last 0.1 s: 3 refused")


def test_a_call_from_before_the_failures_does_not_end_them(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    state = StateLog("reads", logging.getLogger("test"))
    before_s = clock.now_s
    clock.now_s += 1
    state.note(DOWN, clock.now_s)

    state.note(OK, before_s)

    assert len(caplog.records) == 1


def test_a_page_store_logs_each_direction_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    storage = HookedStorage()
    storage.hooks["batch_set"] = lambda answer: [False for _ in answer()]
    storage.hooks["batch_get"] = failing(StorageTimeout("late; the password was swordfish1"))
    storage.hooks["batch_exists"] = failing(StorageUnavailable("gone; swordfish1"))
    settings = PageStoreSettings(breaker_failures=2, breaker_cooldown_s=1000)
    with PageStore(storage, settings) as store:
        store.open_space(TARGET)
        store.save([transfer(filled(3))])
        store.load([transfer(empty(2))])
        store.match(HASHES, [PoolSpec(space=TARGET)])
        store.match(HASHES, [PoolSpec(space=TARGET)])
        storage.hooks.clear()
        store.save([transfer(filled(3))])

    lines = [record for record in caplog.records if record.name == "hicache_storage.page_store"]
    assert {logging.WARNING} == {record.levelno for record in lines}
    told = [
        re.sub(r" pages in the last [0-9.]+ s:", "", record.message.partition("the store ")[2])
        for record in lines
    ]
    assert [
        "refuses pages, because it is full or another write came first; 3 refused",
        "does not answer before its callers' deadlines; 2 timed out",
        "is unavailable; 8 unavailable, 2 timed out",
        f"{LEFT_ALONE}; 8 unavailable, 2 timed out, 8 not tried",
        "is back to normal; 3 refused",
    ] == told
    directions = [record.message.partition(": ")[0] for record in lines]
    write, read = "writes to HookedStorage", "reads from HookedStorage"
    assert directions == [write, read, read, read, write]
    assert "swordfish1" not in caplog.text
