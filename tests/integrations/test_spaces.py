"""Key spaces that are opened in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator
from dataclasses import replace

import pytest
from clocks import Clock, ends_in
from hicache_backends.memory import MemoryStorage
from job_runners import OTHER, SPACE

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import StorageUnavailable
from hicache_storage.integrations import _spaces
from hicache_storage.integrations._spaces import SpaceOpener
from hicache_storage.keys import KeySpace
from hicache_storage.page_store import PageStore


class _Store(PageStore):
    """A page store whose key spaces open when `allowed` is set, or fail with `error`."""

    def __init__(self) -> None:
        super().__init__(MemoryStorage.from_config({}))
        self.error: BaseException | None = None
        self.hanging: set[KeySpace] = set()
        self.allowed = threading.Event()
        self.attempts = 0

    def open_space(self, space: KeySpace) -> None:
        self.attempts += 1
        if space in self.hanging:
            self.allowed.wait(20)
        if self.error is not None:
            raise self.error
        super().open_space(space)


@pytest.fixture
def store() -> Generator[_Store]:
    with _Store() as store:
        yield store
        store.allowed.set()


@pytest.fixture
def spaces(store: _Store) -> Generator[SpaceOpener]:
    spaces = SpaceOpener(store)
    yield spaces
    spaces.close()


def test_a_key_space_is_opened_once(store: _Store, spaces: SpaceOpener) -> None:
    assert spaces.open(SPACE, Deadline(10))
    assert spaces.open(SPACE, Deadline(10))
    assert (1, 1, None) == (store.attempts, spaces.count, spaces.begin(SPACE))


def test_an_attempt_that_hangs_keeps_a_caller_until_its_deadline(
    store: _Store, spaces: SpaceOpener
) -> None:
    store.hanging.add(SPACE)

    assert not spaces.open(SPACE, Deadline(0.05))
    assert spaces.open(OTHER, Deadline(10))
    store.allowed.set()
    assert spaces.open(SPACE, Deadline(10))
    assert 2 == store.attempts


def test_no_attempt_is_made_during_the_back_off(
    store: _Store, spaces: SpaceOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    store.error = StorageUnavailable("down")
    assert not spaces.open(SPACE, Deadline(10))
    clock.now_s += 0.4

    assert spaces.begin(SPACE) is None
    clock.now_s += 0.2
    attempt = spaces.begin(SPACE)
    assert attempt is not None
    attempt.result(10)
    assert (2, 2) == (store.attempts, spaces.failed)


def test_the_back_off_doubles_up_to_thirty_seconds(
    store: _Store, spaces: SpaceOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    store.error = StorageUnavailable("down")
    waits: list[float] = []
    for _ in range(9):
        begin_s = clock.now_s
        while (attempt := spaces.begin(SPACE)) is None:
            clock.now_s += 0.25
        attempt.result(10)
        waits.append(clock.now_s - begin_s)

    assert [0, 0.5, 1, 2, 4, 8, 16, 30, 30] == waits


def test_a_caller_does_not_wait_for_an_attempt_after_a_failure(
    store: _Store, spaces: SpaceOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    store.error = StorageUnavailable("down")
    spaces.open(SPACE, Deadline(10))
    store.hanging.add(SPACE)
    store.error = None
    clock.now_s += 1

    assert not spaces.open(SPACE, Deadline(1000))
    store.allowed.set()
    attempt = spaces.begin(SPACE)
    if attempt is not None:
        attempt.result(10)
    assert spaces.open(SPACE, Deadline(10))


@pytest.mark.parametrize("error", [SystemExit(1), ValueError("odd")], ids=["exit", "value"])
def test_any_error_is_a_failure(store: _Store, spaces: SpaceOpener, error: BaseException) -> None:
    store.error = error

    assert not spaces.open(SPACE, Deadline(10))
    assert 1 == spaces.failed


def test_only_the_first_failure_is_a_warning(
    store: _Store,
    spaces: SpaceOpener,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock(monkeypatch)
    store.error = StorageUnavailable("down")
    for _ in range(3):
        clock.now_s += 100
        attempt = spaces.begin(SPACE)
        assert attempt is not None
        attempt.result(10)

    assert 1 == [record.levelno for record in caplog.records].count(logging.WARNING)


def test_close_does_not_wait_for_the_store(store: _Store, spaces: SpaceOpener) -> None:
    store.hanging.add(SPACE)
    spaces.begin(SPACE)
    with ends_in(5):
        spaces.close()


def test_the_key_space_that_was_used_least_recently_is_forgotten(
    store: _Store, spaces: SpaceOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_spaces, "_MOST_SPACES", 2)
    third = replace(SPACE, pool="third")

    for each in (SPACE, OTHER, SPACE, third):
        assert spaces.open(each, Deadline(10))

    assert [True, False, True] == [store.has_space(each) for each in (SPACE, OTHER, third)]
    assert (2, True) == (spaces.count, spaces.open(OTHER, Deadline(10)))


def test_failures_of_many_key_spaces_are_forgotten(
    store: _Store, spaces: SpaceOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_spaces, "_MOST_SPACES", 2)
    store.error = StorageUnavailable("down")

    for number in range(4):
        spaces.open(replace(SPACE, pool=f"pool-{number}"), Deadline(10))

    assert spaces.begin(replace(SPACE, pool="pool-0")) is not None
    assert spaces.begin(replace(SPACE, pool="pool-3")) is None
