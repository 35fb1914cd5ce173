"""Key spaces are opened by the first write, and tried again after a back-off."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from clocks import Clock
from hicache_backends.memory import MemoryStorage
from pages import space

from hicache_storage.errors import StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.page_store import spaces as page_store_spaces
from hicache_storage.page_store.spaces import OpenSpaces
from hicache_storage.testing import WrapperStorage

SPACE, OTHER, THIRD = (space(pool=pool) for pool in ("kv", "draft", "third"))


class _Store(WrapperStorage):
    """A storage that counts the openings, which fail with `error`."""

    def __init__(self) -> None:
        super().__init__(MemoryStorage.from_config({}))
        self.error: BaseException | None = None
        self.attempts = 0

    def open_space(self, space: KeySpace) -> None:
        self.attempts += 1
        if self.error is not None:
            raise self.error
        super().open_space(space)


@pytest.fixture
def store() -> _Store:
    return _Store()


@pytest.fixture
def spaces(store: _Store) -> OpenSpaces:
    return OpenSpaces(store)


def test_a_key_space_is_opened_once(store: _Store, spaces: OpenSpaces) -> None:
    assert spaces.ensure(SPACE)
    assert spaces.ensure(SPACE)
    assert (1, 1) == (store.attempts, len(spaces))


def test_no_attempt_is_made_during_the_back_off(
    store: _Store, spaces: OpenSpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    store.error = StorageUnavailable("down")
    for later_s in (0, 0.4, 0.2):
        clock.now_s += later_s
        assert not spaces.ensure(SPACE)

    assert (2, 2) == (store.attempts, spaces.failed)


def test_the_back_off_doubles_up_to_thirty_seconds(
    store: _Store, spaces: OpenSpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    store.error = StorageUnavailable("down")
    waits: list[float] = []
    for attempt in range(9):
        begin_s = clock.now_s
        while not spaces.ensure(SPACE) and store.attempts == attempt:
            clock.now_s += 0.25
        waits.append(clock.now_s - begin_s)

    assert [0, 0.5, 1, 2, 4, 8, 16, 30, 30] == waits


@pytest.mark.parametrize("error", [SystemExit(1), ValueError("odd")], ids=["exit", "value"])
def test_any_error_is_a_failure(store: _Store, spaces: OpenSpaces, error: BaseException) -> None:
    store.error = error

    assert not spaces.ensure(SPACE)
    assert 1 == spaces.failed


def test_only_the_first_failure_is_a_warning(
    store: _Store,
    spaces: OpenSpaces,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock(monkeypatch)
    store.error = StorageUnavailable("down")
    for _ in range(3):
        clock.now_s += 100
        spaces.ensure(SPACE)

    assert 1 == [record.levelno for record in caplog.records].count(logging.WARNING)


def test_the_key_space_that_was_used_least_recently_is_forgotten(
    store: _Store, spaces: OpenSpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_store_spaces, "_MOST_SPACES", 2)
    for each in (SPACE, OTHER, SPACE, THIRD):
        assert spaces.ensure(each)

    assert [True, False, True] == [each in spaces for each in (SPACE, OTHER, THIRD)]
    assert (2, True) == (len(spaces), spaces.ensure(OTHER))


def test_failures_of_many_key_spaces_are_forgotten(
    store: _Store, spaces: OpenSpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_store_spaces, "_MOST_SPACES", 2)
    store.error = StorageUnavailable("down")
    for number in range(4):
        spaces.ensure(replace(SPACE, pool=f"pool-{number}"))

    before = store.attempts
    spaces.ensure(replace(SPACE, pool="pool-3"))
    assert before == store.attempts
    spaces.ensure(replace(SPACE, pool="pool-0"))
    assert before + 1 == store.attempts
