"""Exists queries, tested through `match` and `present` of a page store, and hit policies."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from framed import DRAFT, TARGET, framed
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import hash_of
from pages import space as key_space
from stores import HookedStorage, failing

from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.keys import KeySpace, Shard
from hicache_storage.page_store import PageStore, PageStoreSettings
from hicache_storage.page_store.lookup import HitPolicy, PoolSpec, usable_lengths, usable_prefix
from hicache_storage.page_store.results import Transfer, Verdict
from hicache_storage.storage import Capabilities

PROMPT = [hash_of(number) for number in range(4000)]
TARGET_POOL, DRAFT_POOL = PoolSpec(space=TARGET), PoolSpec(space=DRAFT)


@contextmanager
def holding(
    pages: Sequence[int],
    *,
    space: KeySpace = TARGET,
    capabilities: Capabilities | None = None,
    **settings: Any,
) -> Generator[tuple[HookedStorage, PageStore], None, None]:
    """Yield a storage and a page store that hold these pages of the prompt."""
    storage = HookedStorage(capabilities)
    with PageStore(storage, PageStoreSettings(**settings)) as store:
        for known in (TARGET, DRAFT):
            store.open_space(known)
        store.save([Transfer(space, [PROMPT[n] for n in pages], [framed(1) for _ in pages])])
        storage.batches.clear()
        storage.calls.clear()
        yield storage, store


def asked(storage: HookedStorage) -> list[int]:
    return [pages for name, pages in storage.batches if name == "batch_exists"]


class TestMatch:
    def test_a_cold_prompt_of_thousands_of_pages_costs_one_small_call(self) -> None:
        with holding([]) as (storage, store):
            assert store.match(PROMPT, [TARGET_POOL, DRAFT_POOL]).pages == 0
            assert asked(storage) == [64]

    def test_a_warm_prompt_of_thousands_of_pages_costs_a_few_calls(self) -> None:
        with holding(range(4000)) as (storage, store):
            assert store.match(PROMPT, [TARGET_POOL]).pages == 4000
            assert sum(asked(storage)) == 4000
            assert len(asked(storage)) <= 6

    @pytest.mark.parametrize("gap", [0, 63, 64, 65, 319, 320, 1000, 3999])
    def test_no_page_far_behind_the_first_gap_is_queried(self, gap: int) -> None:
        with holding([n for n in range(4000) if n != gap]) as (storage, store):
            assert store.match(PROMPT, [TARGET_POOL]).pages == gap
            assert sum(asked(storage)) <= max(64, 5 * gap)

    def test_past_gaps_every_page_is_queried(self) -> None:
        there = [n for n in range(4000) if n % 3]
        with holding(there) as (storage, store):
            match = store.match(PROMPT, [TARGET_POOL], past_gaps=True)

            assert match.pages == 0
            assert match.present == [[bool(n % 3) for n in range(4000)]]
            assert asked(storage) == [4000]

    def test_a_trailing_pool_is_queried_past_gaps(self) -> None:
        trailing = PoolSpec(space=DRAFT, hit_policy=HitPolicy.TRAILING_PAGES, window_pages=2)
        with holding([5, 298, 299], space=DRAFT) as (_, store):
            match = store.match(PROMPT[:400], [trailing])

            assert match.pages == 300

    def test_a_page_that_the_caller_holds_is_no_gap(self) -> None:
        held = [n % 2 == 0 for n in range(4000)]
        with holding([n for n in range(300) if n % 2]) as (storage, store):
            assert store.match(PROMPT, [TARGET_POOL], held=[held]).pages == 301
            assert sum(asked(storage)) == 64 + 256

    def test_a_gap_in_one_part_ends_the_queries_of_all(self) -> None:
        parts = [replace(TARGET, shard=Shard(layers=(n, n + 1))) for n in range(3)]
        with holding([]) as (storage, store):
            for number, part in enumerate(parts):
                store.open_space(part)
                pages = PROMPT[: 2000 if number != 1 else 10]
                store.save([Transfer(part, pages, [framed(1) for _ in pages])])

            assert store.match(PROMPT, [PoolSpec(space=part) for part in parts]).pages == 10
            assert sorted(asked(storage)) == [64, 64, 64, 256, 1024, 2656]

    def test_it_finds_what_asking_for_everything_would_have_found(self) -> None:
        drawn = random.Random(4)
        for _ in range(30):
            there = {n for n in range(400) if drawn.random() < 0.995}
            held = [drawn.random() < 0.3 for _ in range(400)]
            with holding(
                sorted(there), capabilities=Capabilities(max_batch=drawn.randint(1, 99))
            ) as (
                _,
                store,
            ):
                pages = store.match(PROMPT[:400], [TARGET_POOL], held=[held]).pages

            gaps = [n for n in range(400) if n not in there and not held[n]]
            assert pages == min([*gaps, 400])

    def test_answers_from_before_the_deadline_count(self) -> None:
        """The first blocks' answers count. A block whose answer is late is a failure, not a miss."""
        with holding(range(4000), timeout_s=50) as (storage, store):
            late = threading.Event()

            def slow(answer: Callable[[], Any]) -> Any:
                if storage.calls["batch_exists"] > 2:
                    late.wait(50)
                return answer()

            storage.hooks["batch_exists"] = slow
            match = store.match(PROMPT, [TARGET_POOL, DRAFT_POOL], timeout_s=1)
            late.set()

            assert match.present[0] == [n < 64 + 256 for n in range(4000)]
            assert match.failures == [Verdict.TIMEOUT, Verdict.TIMEOUT]

    def test_a_slow_store_is_asked_by_all_threads_for_a_little_at_a_time(self) -> None:
        capabilities = Capabilities(parallelism=4)
        with holding(range(400), capabilities=capabilities, timeout_s=50) as (storage, store):

            def slow(answer: Callable[[], Any]) -> Any:
                time.sleep(0.004 * storage.batches[-1][1])
                return answer()

            storage.hooks["batch_exists"] = slow
            store.match(PROMPT[:64], [TARGET_POOL])
            storage.batches.clear()
            store.match(PROMPT[:64], [TARGET_POOL])

            assert asked(storage) == [16] * 4

    @pytest.mark.parametrize("error", [StorageUnavailable("gone"), StorageTimeout("late")])
    def test_a_store_that_is_gone_is_asked_once(self, error: Exception) -> None:
        capabilities = Capabilities(max_batch=1)
        with holding(range(8), capabilities=capabilities) as (storage, store):
            storage.hooks["batch_exists"] = failing(error)

            held = [[n < 8 for n in range(4000)], [False] * 4000]
            match = store.match(PROMPT, [TARGET_POOL, DRAFT_POOL], held=held)

            assert match.pages == 0
            assert storage.calls["batch_exists"] == 1
            assert None not in match.failures


class TestPresent:
    def test_each_hash_has_its_verdict_in_any_order_and_twice(self) -> None:
        numbers = [7, 3000, 7, 1, 2, 2, 900, 0]
        with holding([7, 2, 900]) as (storage, store):
            found = store.present(TARGET, [PROMPT[n] for n in numbers])

            assert [n in (7, 2, 900) for n in numbers] == found
            assert asked(storage) == [8]
            assert not any(store.present(DRAFT, [PROMPT[n] for n in numbers]))

    def test_thousands_of_pages_with_gaps_are_one_call(self) -> None:
        with holding([3999]) as (storage, store):
            assert [n == 3999 for n in range(4000)] == store.present(TARGET, PROMPT)
            assert asked(storage) == [4000]

    def test_a_page_without_an_answer_is_neither_present_nor_absent(self) -> None:
        """One call fails, but the answers of the other calls count."""
        with holding([0, 5, 8], capabilities=Capabilities(max_batch=4)) as (storage, store):
            bugs = iter([RuntimeError("bug")])

            def fail_once(answer: Callable[[], Any]) -> Any:
                for bug in bugs:
                    raise bug
                return answer()

            storage.hooks["batch_exists"] = fail_once
            found = store.present(TARGET, PROMPT[:12])

            assert [None] * 4 == found[:4]
            assert [False, True, False, False, True, False, False, False] == found[4:]
            assert store.stats()["match_failed"] == 1

    @pytest.mark.parametrize("error", [StorageUnavailable("gone"), ValueError("bug")])
    def test_a_store_that_fails_gives_no_answer(self, error: Exception) -> None:
        with holding([0, 1], breaker_failures=2) as (storage, store):
            storage.hooks["batch_exists"] = failing(error)
            for _ in range(3):
                assert [None, None] == store.present(TARGET, PROMPT[:2])

            assert storage.calls["batch_exists"] == 2
            assert store.breaker.reads.state == "open"

    def test_it_has_a_deadline(self) -> None:
        with holding([0]) as (storage, store):
            go_on = threading.Event()
            storage.hooks["batch_exists"] = lambda answer: go_on.wait(50) and answer()

            assert [None] == store.present(TARGET, PROMPT[:1], timeout_s=0.05)
            go_on.set()

    @pytest.mark.parametrize("hashes", [["XYZ"], ["../../etc/passwd"]])
    def test_a_malformed_hash_is_refused(self, hashes: list[str]) -> None:
        with holding([]) as (storage, store):
            with pytest.raises(ValueError, match="lowercase hex"):
                store.present(TARGET, hashes)
            assert not storage.calls


class TestLookup:
    def test_an_answered_hash_is_ok_or_a_miss(self) -> None:
        with holding([7, 2]) as (_, store):
            found = store.lookup(TARGET, [PROMPT[n] for n in (2, 3, 7)])

            assert found == [Verdict.OK, Verdict.MISS, Verdict.OK]

    @pytest.mark.parametrize(
        ("error", "verdict"),
        [
            (StorageUnavailable("gone"), Verdict.UNAVAILABLE),
            (StorageTimeout("slow"), Verdict.TIMEOUT),
            (ValueError("bug"), Verdict.ERROR),
        ],
    )
    def test_a_store_that_fails_gives_its_reason(self, error: Exception, verdict: Verdict) -> None:
        with holding([0], breaker_failures=1) as (storage, store):
            storage.hooks["batch_exists"] = failing(error)

            assert [verdict] == store.lookup(TARGET, PROMPT[:1])
            assert [Verdict.BREAKER_OPEN] == store.lookup(TARGET, PROMPT[:1])

    def test_a_hash_without_an_answer_at_the_deadline_is_a_timeout(self) -> None:
        with holding([0]) as (storage, store):
            go_on = threading.Event()
            storage.hooks["batch_exists"] = lambda answer: go_on.wait(50) and answer()

            assert [Verdict.TIMEOUT] == store.lookup(TARGET, PROMPT[:1], timeout_s=0.05)
            go_on.set()


def trailing(window_pages: int) -> PoolSpec:
    return PoolSpec(
        space=key_space(pool="swa"), hit_policy=HitPolicy.TRAILING_PAGES, window_pages=window_pages
    )


def bits(text: str) -> list[bool]:
    return [digit == "1" for digit in text]


@pytest.mark.parametrize(
    ("target", "draft", "prefix"),
    [
        ("1111", "1111", 4),
        ("1111", "1100", 2),
        ("1011", "1111", 1),
        ("0111", "1111", 0),
        ("", "", 0),
    ],
)
def test_a_prefix_ends_where_the_first_pool_has_a_hole(
    target: str, draft: str, prefix: int
) -> None:
    assert prefix == usable_prefix([TARGET_POOL, DRAFT_POOL], [bits(target), bits(draft)])


@pytest.mark.parametrize(
    ("side", "window_pages", "prefix"),
    [
        ("0011", 2, 4),
        ("0111", 3, 4),
        ("0110", 2, 3),
        ("0001", 2, 0),
        ("1000", 2, 1),
        ("0101", 1, 4),
    ],
)
def test_a_trailing_pool_needs_its_last_pages_only(
    side: str, window_pages: int, prefix: int
) -> None:
    pools = [TARGET_POOL, trailing(window_pages)]

    assert prefix == usable_prefix(pools, [bits("1111"), bits(side)])


def test_with_a_trailing_pool_a_longer_prefix_can_be_usable_where_a_shorter_is_not() -> None:
    usable = usable_lengths([TARGET_POOL, trailing(1)], [bits("1111"), bits("1001")])

    assert [True, True, False, False, True] == usable


@settings(deadline=None)  # The machine may be busy.
@given(
    st.integers(0, 8).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=3, max_size=3)
    ),
    st.integers(1, 9),
)
def test_lengths_agree_with_the_definition(present: list[list[bool]], window_pages: int) -> None:
    pools = [TARGET_POOL, DRAFT_POOL, trailing(window_pages)]
    target, draft, side = present

    expected = [
        all(target[:end]) and all(draft[:end]) and all(side[max(0, end - window_pages) : end])
        for end in range(len(target) + 1)
    ]

    assert expected == usable_lengths(pools, present)


def test_a_pool_has_a_bare_key_space() -> None:
    with pytest.raises(ValueError, match="must have no frame"):
        PoolSpec(space=key_space(frame_nbytes=128))


def test_a_window_has_at_least_one_page() -> None:
    with pytest.raises(ValueError, match="window_pages"):
        trailing(0)
