"""Pools that need only a window before the end of a prefix: sliding windows, Mamba states."""

from __future__ import annotations

from typing import Any

import pytest
from engines import PROMPT, compute, delete_pages, engine_on, free_slots, is_right, leaked, windowed
from pages import hash_of
from stores import HookedStorage, failing

from hicache_storage.controller import Reason
from hicache_storage.errors import StorageUnavailable


@pytest.fixture
def storage() -> HookedStorage:
    """Return a storage with the prompt and windows of 2 pages, so that 8 or 16 pages are usable."""
    storage = HookedStorage()
    with engine_on(storage, windowed()) as first:
        compute(first, PROMPT, ends=[8, 16])
        assert first.drain(20)
    return storage


def stored(storage: HookedStorage) -> dict[str, int]:
    return {space.pool: len(list(storage.inner.scan(space))) for space in storage.inner.spaces()}


def test_only_windows_are_written(storage: HookedStorage) -> None:
    assert {"kv": 16, "draft": 16, "swa": 4} == stored(storage)


def test_only_the_last_window_is_loaded(storage: HookedStorage) -> None:
    with engine_on(storage, windowed()) as engine:
        with engine.prefetch("r", PROMPT).result() as lease:
            assert lease.pages == 16
            assert [14, 15] == lease.indices[2]
            assert is_right(lease)
            assert [16, 16, 6] == free_slots(engine)
        assert not leaked(engine)


def test_a_page_outside_every_window_costs_no_slot() -> None:
    with engine_on(HookedStorage(), windowed(window_slots=2)) as engine:
        assert compute(engine, PROMPT) == 16
        assert [16, 16, 0] == free_slots(engine)


def test_a_prefix_is_usable_where_a_window_is_whole_and_not_between(
    storage: HookedStorage,
) -> None:
    with engine_on(storage, windowed()) as engine:
        for asked, usable in ((16, 16), (15, 8), (9, 8), (8, 8), (7, 0)):
            with engine.prefetch(f"{asked}", PROMPT[:asked]).result() as lease:
                assert (asked, usable) == (asked, lease.pages)
                assert is_right(lease)


@pytest.mark.parametrize("lost", [14, 15])
def test_a_window_that_is_not_whole_shortens_to_one_that_is(
    storage: HookedStorage, lost: int
) -> None:
    delete_pages(storage, "swa", [PROMPT[lost]])
    with engine_on(storage, windowed()) as engine:
        with engine.prefetch("r", PROMPT).result() as lease:
            assert lease.pages == 8
            assert [6, 7] == lease.indices[2]
            assert is_right(lease)
        explained = engine.explain("r")
        assert (lost, "swa", Reason.ABSENT) == (
            explained.first_missing,
            explained.pool,
            explained.reason,
        )


def test_a_window_that_vanishes_after_the_match_leaves_what_l2_can_use(
    storage: HookedStorage,
) -> None:
    with engine_on(storage, windowed()) as engine:
        engine.prefetch("head", PROMPT[:8]).result().release()

        def vanish(answer: Any) -> Any:
            delete_pages(storage, "swa", PROMPT[15:16])
            return answer()

        storage.hooks["batch_get"] = vanish
        with engine.prefetch("r", PROMPT).result() as lease:
            assert lease.pages == 8
            assert is_right(lease)
        assert engine.explain("r").reason is Reason.VANISHED
        assert not leaked(engine)


@pytest.mark.parametrize(
    ("pool", "page", "why"),
    [
        ("swa", 14, (14, "swa", Reason.VANISHED)),
        ("draft", 15, (15, "draft", Reason.VANISHED)),
        ("kv", 12, (10, "swa", Reason.ABSENT)),  # 12 pages are left, and no window at their end
    ],
)
def test_a_window_is_fetched_for_the_prefix_that_is_left_when_pages_vanish(
    storage: HookedStorage, pool: str, page: int, why: tuple[int, str, Reason]
) -> None:
    def vanish(answer: Any) -> Any:
        delete_pages(storage, pool, [PROMPT[page]])
        return answer()

    storage.hooks["batch_get"] = vanish
    with engine_on(storage, windowed()) as engine:
        with engine.prefetch("r", PROMPT).result() as lease:
            assert (lease.pages, lease.indices[2]) == (8, [6, 7])
            assert is_right(lease)
        explained = engine.explain("r")
        assert why == (
            explained.first_missing,
            explained.pool,
            explained.reason,
        )
        assert not leaked(engine)


def test_no_shorter_window_is_fetched_from_a_store_that_fails(storage: HookedStorage) -> None:
    storage.hooks["batch_get"] = failing(StorageUnavailable("down"))
    with engine_on(storage, windowed(), batch_pages=16) as engine:
        assert engine.prefetch("r", PROMPT).result().pages == 0
        assert engine.explain("r").reason is Reason.UNAVAILABLE

    assert storage.calls["batch_get"] == 3  # one a pool


def test_a_window_is_loaded_for_pages_that_l2_has(storage: HookedStorage) -> None:
    """L2 has the target's pages from a longer prompt. Only L3 has the shorter prompt's window."""
    with engine_on(storage, windowed()) as engine:
        engine.prefetch("long", PROMPT).result().release()
        with engine.prefetch("short", PROMPT[:8]).result() as lease:
            assert (lease.pages, lease.loaded) == (8, [6, 7])
            assert is_right(lease)
        assert not leaked(engine)


def test_windows_are_evicted_for_windows_before_pages_are() -> None:
    """The pool of windows is full: an unpinned page loses its window, but stays in L2."""
    with engine_on(None, windowed(slots=32, window_slots=2)) as engine:
        other = [hash_of(100 + number) for number in range(8)]
        compute(engine, PROMPT[:8])
        compute(engine, other)
        assert len(engine.cache) == 16

        with engine.prefetch("other", other).result() as lease:
            assert lease.pages == 8
            assert is_right(lease)
        assert engine.prefetch("first", PROMPT[:8]).result().pages == 0


def test_pinned_windows_stay() -> None:
    with engine_on(None, windowed(slots=32, window_slots=2)) as engine:
        compute(engine, PROMPT[:8])
        with engine.prefetch("r", PROMPT[:8]).result() as lease:
            assert compute(engine, [hash_of(100 + n) for n in range(8)], timeout_s=0) == 6
            assert lease.pages == 8
            assert is_right(lease)
        assert not leaked(engine)
