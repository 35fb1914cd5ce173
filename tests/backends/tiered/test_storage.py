from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from clocks import ends_in
from composed_stores import Controlled, file_member, memory_member
from framed import HASHES, TARGET, empty, filled, transfer
from hicache_backends.tiered import TieredSettings, TieredStorage
from hicache_backends.tiered.moves import Moves
from pages import blank, hash_of, page, space
from servers import wait_until

from hicache_storage.backend_support.revocable import AtomicRevocable
from hicache_storage.errors import StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.page_store import PageStore
from hicache_storage.page_store.results import Verdict
from hicache_storage.storage import PageTimes

SPACE = space()
A, B, C = (hash_of(number) for number in range(3))
DEADLINE_S = 0.5
HASTY = {"timeout_s": DEADLINE_S, "lookup_timeout_s": DEADLINE_S}
"""Limits for tests in which a tier hangs. Others have so much time that a busy machine needs no more."""


def always(times: PageTimes) -> Callable[[KeySpace, Sequence[str]], list[PageTimes]]:
    """Return a `page_times` that gives every page the same times."""
    return lambda _, hashes: [times] * len(hashes)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


class Tiers:
    """Three stores under a test's control, and a tiered storage over the first ones of them."""

    def __init__(self, count: int = 2, **config: object) -> None:
        self.stores = [Controlled() for _ in range(count)]
        members = [memory_member("abc"[n]) for n in range(count)]
        limits = {"timeout_s": 60, "lookup_timeout_s": 60, "breaker_cooldown_s": 60}
        settings = TieredSettings.parse("tiered", {"tiers": members, **limits, **config})
        self.storage = TieredStorage(
            dict(zip("abc", self.stores, strict=False)), settings, read_only=False
        )
        self.storage.open_space(SPACE)

    @property
    def first(self) -> Controlled:
        return self.stores[0]

    @property
    def last(self) -> Controlled:
        return self.stores[-1]

    def set(self, *hashes: str) -> list[bool]:
        return self.storage.batch_set(SPACE, hashes, [page(seed=int(one, 16)) for one in hashes])

    def put(self, store: Controlled, *hashes: str) -> None:
        """Store pages in one tier only."""
        store.batch_set(SPACE, hashes, [page(seed=int(one, 16)) for one in hashes])

    def get(self, *hashes: str) -> list[bool]:
        """Read pages. Check that each hit has its own bytes."""
        targets = [blank() for _ in hashes]
        hits = self.storage.batch_get(SPACE, hashes, targets)
        for one, hit, target in zip(hashes, hits, targets, strict=True):
            assert not hit or target.tobytes() == page(seed=int(one, 16)).tobytes()
        return hits

    def counter(self, name: str) -> int:
        return self.storage.stats().counters.get(name, 0)


@pytest.fixture
def build() -> Iterator[Callable[..., Tiers]]:
    made: list[Tiers] = []

    def build(count: int = 2, **config: object) -> Tiers:
        made.append(Tiers(count, **config))
        return made[-1]

    yield build
    for tiers in made:
        for store in tiers.stores:
            store.go_on()
        tiers.storage.close()


Build = Callable[..., Tiers]


class TestReads:
    def test_each_tier_is_asked_for_what_is_missing(self, build: Build) -> None:
        tiers = build(3)
        for store, one in zip(tiers.stores, (A, B, C), strict=True):
            tiers.put(store, one)

        assert [True, True, True, False] == tiers.get(A, B, C, hash_of(9))
        assert [1, 1, 1] == [tiers.counter(f"{name}.hits") for name in "abc"]

    def test_a_page_is_promoted_at_its_second_use(self, build: Build) -> None:
        tiers = build(promote="second_use")
        tiers.put(tiers.last, A)

        tiers.get(A)
        assert not tiers.first.has(SPACE, A)
        tiers.get(A)
        wait_until(lambda: tiers.first.has(SPACE, A))

    def test_always_promotes_to_every_tier_above(self, build: Build) -> None:
        tiers = build(3, promote="always")
        tiers.put(tiers.last, A)

        tiers.get(A)

        wait_until(lambda: all(store.has(SPACE, A) for store in tiers.stores))

    def test_never_promotes(self, build: Build) -> None:
        tiers = build(promote="never")
        tiers.put(tiers.last, A)

        assert [[True]] * 3 == [tiers.get(A) for _ in range(3)]
        tiers.storage.close()  # finishes copies under way
        assert "set" not in tiers.first.calls

    def test_a_revoked_page_from_a_lower_tier_is_a_miss(self, build: Build) -> None:
        tiers = build()
        tiers.put(tiers.last, A)
        target = blank()
        target.revocable = AtomicRevocable()
        target.revocable.revoke()

        assert [False] == tiers.storage.batch_get(SPACE, [A], [target])
        assert blank().tobytes() == target.tobytes()

    def test_a_page_of_another_size_is_a_miss(self, build: Build) -> None:
        tiers = build()
        tiers.put(tiers.last, A, B)

        assert [False, True] == tiers.storage.batch_get(SPACE, [A, B], [blank(100), blank()])


class TestDamage:
    def test_a_lower_tier_serves_a_page_that_is_damaged_above(self, build: Build) -> None:
        tiers = build(promote="never")
        with closing(PageStore(tiers.storage)) as store:
            store.open_space(TARGET)
            framed_space = store.framed(TARGET)
            store.save([transfer(filled())])
            tiers.first.damage(framed_space, HASHES[0])

            assert [Verdict.OK] * 8 == store.load([transfer(empty())]).verdicts[0]
            wait_until(lambda: tiers.first.has(framed_space, HASHES[0]))
            tiers.last.is_down = True
            assert [Verdict.OK] * 8 == store.load([transfer(empty())]).verdicts[0]

        assert 1 == tiers.counter("a.wrong_pages")

    def test_a_page_that_is_damaged_everywhere_is_counted_by_the_page_store(
        self, build: Build
    ) -> None:
        tiers = build()
        with closing(PageStore(tiers.storage)) as store:
            store.open_space(TARGET)
            store.save([transfer(filled(2))])
            for each in tiers.stores:
                each.damage(store.framed(TARGET), HASHES[0])

            assert [Verdict.CORRUPT, Verdict.OK] == store.load([transfer(empty(2))]).verdicts[0]
            assert [False, True] == tiers.storage.batch_exists(store.framed(TARGET), HASHES[:2])

    def test_a_damaged_page_is_a_miss_if_the_tier_below_did_not_answer(self, build: Build) -> None:
        tiers = build()
        with closing(PageStore(tiers.storage)) as store:
            store.open_space(TARGET)
            framed_space = store.framed(TARGET)
            store.save([transfer(filled(1))])
            tiers.first.damage(framed_space, HASHES[0])
            tiers.last.is_down = True

            assert [Verdict.PART_UNAVAILABLE] == store.load([transfer(empty(1))]).verdicts[0]

        assert not tiers.first.has(framed_space, HASHES[0])
        assert tiers.last.has(framed_space, HASHES[0])

    def test_a_damaged_page_is_not_promoted(self, build: Build) -> None:
        tiers = build(3, promote="always")
        with closing(PageStore(tiers.storage)) as store:
            store.open_space(TARGET)
            framed_space = store.framed(TARGET)
            store.save([transfer(filled(1))])
            tiers.first.batch_delete(framed_space, HASHES)
            tiers.stores[1].damage(framed_space, HASHES[0])

            assert [Verdict.OK] == store.load([transfer(empty(1))]).verdicts[0]
            wait_until(lambda: all(store.has(framed_space, HASHES[0]) for store in tiers.stores))
            tiers.last.is_down = True
            assert [Verdict.OK] == store.load([transfer(empty(1))]).verdicts[0]

    def test_a_tier_that_hangs_while_it_is_healed_costs_one_deadline(self, build: Build) -> None:
        tiers = build(3, promote="never", **HASTY)
        with closing(PageStore(tiers.storage)) as store:
            store.open_space(TARGET)
            framed_space = store.framed(TARGET)
            store.save([transfer(filled())])
            tiers.first.batch_delete(framed_space, HASHES)
            tiers.stores[1].damage(framed_space, HASHES[0])
            tiers.stores[1].hang("delete")

            with ends_in(10 * DEADLINE_S):
                outcome = store.load([transfer(empty())])

            assert [Verdict.OK] * 8 == outcome.verdicts[0]


class TestFailures:
    def test_a_tier_that_is_down_costs_its_own_pages_only(self, build: Build) -> None:
        tiers = build()
        tiers.set(A)
        tiers.put(tiers.last, B)
        tiers.last.is_down = True

        assert [True, False] == tiers.get(A, B)
        assert [True, False] == tiers.storage.batch_exists(SPACE, [A, B])
        assert [True] == tiers.set(C)

    def test_the_tier_below_takes_over_for_a_first_tier_that_is_down(self, build: Build) -> None:
        tiers = build()
        tiers.first.is_down = True

        assert [True] == tiers.set(A)
        assert [True] == tiers.get(A)

    def test_a_call_raises_if_no_tier_answers(self, build: Build) -> None:
        tiers = build()
        for store in tiers.stores:
            store.is_down = True

        with pytest.raises(StorageUnavailable, match="refused"):
            tiers.get(A)
        with pytest.raises(StorageUnavailable, match="refused"):
            tiers.storage.batch_delete(SPACE, [A])

    def test_a_hung_tier_costs_one_deadline_and_then_nothing(self, build: Build) -> None:
        tiers = build(**HASTY)
        tiers.put(tiers.first, A)
        tiers.put(tiers.last, B)
        tiers.last.hang("get")

        began_s = time.monotonic()
        with ends_in(10 * DEADLINE_S):
            assert [True, False] == tiers.get(A, B)
        assert time.monotonic() - began_s >= DEADLINE_S
        tiers.last.calls.clear()
        assert [True, False] == tiers.get(A, B)
        assert [] == tiers.last.calls

    def test_a_first_tier_that_hangs_holds_one_thread(self, build: Build) -> None:
        tiers = build(promote="never", breaker_cooldown_s=0.01, **HASTY)
        tiers.set(A)
        tiers.first.calls.clear()
        tiers.first.hang("get")

        with ThreadPoolExecutor() as pool:
            hung = pool.submit(tiers.get, A)
            time.sleep(2 * DEADLINE_S)  # only time makes a call overdue
            assert [[True]] * 3 == [tiers.get(A) for _ in range(3)]
            assert ["get"] == tiers.first.calls
            tiers.first.go_on()
            assert [True] == hung.result()

        wait_until(lambda: tiers.get(A) == [True] and tiers.first.calls.count("get") > 1)

    def test_a_tier_is_asked_again_after_the_cooldown(self, build: Build) -> None:
        tiers = build(breaker_cooldown_s=0.05)
        tiers.put(tiers.last, B)
        tiers.last.is_down = True
        assert [[False]] * 4 == [tiers.get(B) for _ in range(4)]
        tiers.last.is_down = False

        wait_until(lambda: tiers.get(B) == [True])

    def test_a_delete_is_not_done_while_a_tier_is_down(self, build: Build) -> None:
        tiers = build()
        tiers.set(A)
        tiers.last.is_down = True

        assert [False] == tiers.storage.batch_delete(SPACE, [A])

    def test_what_nobody_stored_never_appears(self, build: Build) -> None:
        tiers = build(**HASTY)
        tiers.first.is_full = True
        tiers.last.hang("set")

        assert [False] == tiers.set(A)
        tiers.last.go_on()
        wait_until(lambda: tiers.last.has(SPACE, A))  # the hung write landed

        assert [False] == tiers.storage.batch_exists(SPACE, [A])
        assert [False] == tiers.get(A)

    def test_a_listing_does_not_leave_out_a_tier_that_is_down(self, build: Build) -> None:
        tiers = build()
        tiers.last.is_down = True

        with pytest.raises(StorageUnavailable, match="tier 'b': connection refused"):
            list(tiers.storage.scan(SPACE))
        with pytest.raises(StorageUnavailable, match="tier 'b'"):
            tiers.storage.clear(SPACE)


class TestWrites:
    def test_through_stores_in_every_tier_before_it_returns(self, build: Build) -> None:
        tiers = build(3)

        assert [True, True] == tiers.set(A, B)
        assert all(store.has(SPACE, A) and store.has(SPACE, B) for store in tiers.stores)

    def test_back_returns_before_the_lower_tier_has_the_page(self, build: Build) -> None:
        tiers = build(write="back")
        tiers.last.hang("set")

        assert [True] == tiers.set(A)
        assert not tiers.last.has(SPACE, A)
        tiers.last.go_on()
        wait_until(lambda: tiers.last.has(SPACE, A))

    def test_back_stores_below_what_the_first_tier_refuses(self, build: Build) -> None:
        tiers = build(write="back")
        tiers.first.is_full = True

        assert [True] == tiers.set(A)
        assert tiers.last.has(SPACE, A)

    def test_copies_that_find_no_memory_are_counted(self, build: Build) -> None:
        tiers = build(write="back", copy_nbytes=8 * 4096)
        tiers.last.hang("set")

        assert [True] * 20 == [tiers.set(hash_of(n))[0] for n in range(20)]

        assert 4 == tiers.counter("b.writeback")
        assert 16 == tiers.counter("b.writeback_skipped")

    def test_close_finishes_the_copies(self, build: Build) -> None:
        tiers = build(write="back")
        tiers.last.hang("set")
        tiers.set(A, B)

        with ThreadPoolExecutor() as pool:
            closing_ = pool.submit(tiers.storage.close)
            tiers.last.go_on()
            closing_.result()

        assert ["set"] == [call for call in tiers.last.calls if call == "set"]

    def test_the_times_of_a_page_are_those_after_its_copies(
        self, build: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tiers = build(write="back")
        tiers.last.hang("set")
        written_at_s = {True: 7.0, False: None}

        def times(_: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
            return [
                PageTimes(written_at_s=written_at_s[tiers.last.has(SPACE, one)]) for one in hashes
            ]

        monkeypatch.setattr(tiers.last, "page_times", times)
        tiers.set(A)
        with ThreadPoolExecutor() as pool:
            asking = pool.submit(tiers.storage.page_times, SPACE, [A])
            with pytest.raises(TimeoutError):
                asking.result(0.1)
            tiers.last.go_on()

            assert [PageTimes(written_at_s=7.0)] == asking.result()

    def test_the_last_use_is_unknown_if_a_tier_serves_the_page_and_notes_none(
        self, build: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tiers = build()
        used = PageTimes(written_at_s=7.0, used_at_s=8.0)

        monkeypatch.setattr(tiers.last, "page_times", always(used))
        tiers.set(A)

        assert [PageTimes(written_at_s=7.0)] == tiers.storage.page_times(SPACE, [A])
        tiers.first.batch_delete(SPACE, [A])
        assert [used] == tiers.storage.page_times(SPACE, [A])

    def test_the_last_use_is_that_of_the_tier_that_serves_the_page(
        self, build: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tiers = build()
        used = PageTimes(written_at_s=7.0, used_at_s=8.0)

        monkeypatch.setattr(tiers.first, "page_times", always(used))
        tiers.set(A)

        assert [used] == tiers.storage.page_times(SPACE, [A])

    def test_a_time_is_unknown_if_a_shared_tier_has_the_page_and_notes_none(
        self, build: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Other hosts use that copy, and this host's own tier knows nothing of it."""
        tiers = build()
        monkeypatch.setattr(tiers.first, "page_times", always(PageTimes(used_at_s=8.0)))
        monkeypatch.setitem(
            vars(tiers.last), "capabilities", replace(tiers.last.capabilities, shared=True)
        )
        tiers.set(A)
        tiers.put(tiers.first, B)

        assert [PageTimes(), PageTimes(used_at_s=8.0)] == tiers.storage.page_times(SPACE, [A, B])
        monkeypatch.setattr(tiers.last, "page_times", always(PageTimes(written_at_s=7.0)))
        assert [PageTimes(written_at_s=7.0)] == tiers.storage.page_times(SPACE, [A])

    def test_a_copy_that_was_written_later_counts_as_a_use(
        self, build: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tiers = build()
        used = PageTimes(written_at_s=7.0, used_at_s=8.0)

        monkeypatch.setattr(tiers.first, "page_times", always(used))
        monkeypatch.setattr(tiers.last, "page_times", always(PageTimes(written_at_s=20.0)))
        tiers.set(A)

        (found,) = tiers.storage.page_times(SPACE, [A])
        assert found == PageTimes(written_at_s=20.0, used_at_s=20.0)

    def test_a_later_copy_hides_no_use_that_may_not_have_been_recorded(
        self, build: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tiers = build()
        used = PageTimes(written_at_s=7.0, used_at_s=8.0, used_within_s=300.0)
        monkeypatch.setattr(tiers.first, "page_times", always(used))
        monkeypatch.setattr(tiers.last, "page_times", always(PageTimes(written_at_s=20.0)))
        tiers.set(A)

        (found,) = tiers.storage.page_times(SPACE, [A])
        assert found == PageTimes(written_at_s=20.0, used_at_s=20.0, used_within_s=288.0)

    def test_pages_that_change_after_a_set_do_not_change_its_copies(self, build: Build) -> None:
        tiers = build(write="back", promote="always")
        tiers.last.hang("set")
        source = page(seed=int(A, 16))

        tiers.storage.batch_set(SPACE, [A], [source])
        source.segments[0][:] = bytes(source.nbytes)
        tiers.last.go_on()
        wait_until(lambda: tiers.last.has(SPACE, A))
        tiers.first.batch_delete(SPACE, [A])

        assert [True] == tiers.get(A)  # compares the bytes


class TestRemovals:
    def test_a_deleted_page_is_not_written_back(self, build: Build) -> None:
        tiers = build(write="back")
        tiers.last.hang("set")
        tiers.set(A)
        wait_until(lambda: "set" in tiers.last.calls)

        with ThreadPoolExecutor() as pool:
            deleting = pool.submit(tiers.storage.batch_delete, SPACE, [A])
            tiers.last.go_on()
            assert [True] == deleting.result()

        assert not tiers.last.has(SPACE, A)

    def test_a_copy_that_outlasts_a_delete_is_undone(self, build: Build) -> None:
        tiers = build(write="back", **HASTY)
        tiers.last.hang("set")
        tiers.set(A)
        wait_until(lambda: "set" in tiers.last.calls)

        assert [False] == tiers.storage.batch_delete(SPACE, [A])
        tiers.last.go_on()

        wait_until(lambda: "delete" in tiers.last.calls)
        wait_until(lambda: not tiers.last.has(SPACE, A))

    @pytest.mark.parametrize("upper", ["ab", "cb", "cab", "m"])
    def test_a_delete_reaches_the_copies_of_another_handle(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upper: str
    ) -> None:
        def handle(names: str) -> TieredStorage:
            tiers = [
                memory_member(name) if name == "m" else file_member(name, tmp_path / name)
                for name in names
            ]
            config = {"tiers": tiers, "write": "back", "timeout_s": DEADLINE_S}
            return TieredStorage.from_config(config)

        with handle("ab") as one, handle("mb" if upper == "m" else upper) as other:
            for part in one.parts().values():  # without the limit of the tiers
                part.open_space(SPACE)
            below = one.parts()["b"]
            begun, go_on, set_below = threading.Event(), threading.Event(), below.batch_set

            def late(*arguments: Any) -> list[bool]:
                begun.set()
                assert go_on.wait(30)
                return set_below(*arguments)

            monkeypatch.setattr(below, "batch_set", late)
            one.batch_set(SPACE, [A], [page(seed=0)])
            assert begun.wait(10)

            assert [False] == other.batch_delete(SPACE, [A])
            go_on.set()
            wait_until(lambda: [True] == other.batch_delete(SPACE, [A]))
            assert [False] == below.batch_exists(SPACE, [A])

    def test_an_interrupted_removal_cancels_no_later_copy(
        self, build: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tiers = build(write="back")
        with monkeypatch.context() as interrupted:
            interrupted.setattr(Moves, "_settle", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                tiers.storage.batch_delete(SPACE, [A])

        tiers.set(A)
        wait_until(lambda: tiers.last.has(SPACE, A))

    def test_a_set_does_not_wait_until_a_hung_tier_has_undone_its_copy(self, build: Build) -> None:
        tiers = build(write="back", breaker_failures=100, **HASTY)
        tiers.last.hang("set", "delete")
        threads = tiers.last.capabilities.parallelism
        tiers.set(*(hash_of(100 + number) for number in range(threads)))
        wait_until(lambda: "set" in tiers.last.calls)
        tiers.first.is_full = True

        with ThreadPoolExecutor() as pool:
            setting = pool.submit(tiers.set, A)
            deleting = pool.submit(tiers.storage.batch_delete, SPACE, [A])

            assert [False] == setting.result(20 * DEADLINE_S)
            assert [False] == deleting.result(20 * DEADLINE_S)

    def test_a_page_that_is_deleted_while_it_is_read_is_not_promoted(self, build: Build) -> None:
        tiers = build(promote="always")
        tiers.put(tiers.last, A)
        tiers.last.hang("get")

        with ThreadPoolExecutor() as pool:
            reading = pool.submit(tiers.get, A)
            wait_until(lambda: "get" in tiers.last.calls)
            deleted = tiers.storage.batch_delete(SPACE, [A])
            tiers.last.go_on()
            reading.result()

        assert [True] == deleted
        tiers.storage.close()
        assert "set" not in tiers.first.calls

    def test_clear_counts_each_page_once_and_reaches_copies(self, build: Build) -> None:
        tiers = build(3, write="back")
        tiers.set(A, B)
        wait_until(lambda: all(store.has(SPACE, B) for store in tiers.stores))
        tiers.put(tiers.last, C)

        assert 3 == tiers.storage.clear(SPACE)
        assert [False] * 3 == tiers.storage.batch_exists(SPACE, [A, B, C])
        assert [True] == tiers.set(A)

    def test_remove_space_counts_each_page_once(self, build: Build) -> None:
        tiers = build()
        tiers.set(A, B)

        assert 2 == tiers.storage.remove_space(SPACE.id)
        assert [] == list(tiers.storage.spaces())
        assert [True] == tiers.set(A)

    def test_scan_lists_each_page_once(self, build: Build) -> None:
        tiers = build(3)
        tiers.set(A)
        tiers.put(tiers.last, B)

        assert sorted([A, B]) == sorted(info.page_hash for info in tiers.storage.scan(SPACE))


class TestMemory:
    def test_a_hung_tier_holds_no_more_than_the_limit(self, build: Build) -> None:
        tiers = build(write="back", copy_nbytes=8 * 4096, **HASTY)
        tiers.last.hang("set", "get")
        for n in range(20):
            tiers.set(hash_of(n))
            tiers.get(hash_of(100 + n))

        assert tiers.storage._copiers.get().memory.used_nbytes <= 8 * 4096

    def test_a_hung_tier_leaves_memory_to_the_others(self, build: Build) -> None:
        tiers = build(3, copy_nbytes=2 * 4096, **HASTY)
        tiers.put(tiers.stores[1], A)
        tiers.last.hang("get", "set")
        tiers.set(B)
        tiers.get(C)

        assert [True] == tiers.get(A)

    def test_memory_is_free_when_the_copies_have_ended(self, build: Build) -> None:
        tiers = build(write="back", promote="always")
        tiers.put(tiers.last, A)
        tiers.get(A)
        tiers.set(B, C)

        wait_until(lambda: tiers.storage._copiers.get().memory.used_nbytes == 0)

    def test_a_batch_larger_than_the_memory_is_read_and_written_in_parts(
        self, build: Build
    ) -> None:
        tiers = build(copy_nbytes=8 * 4096)
        hashes = [hash_of(n) for n in range(50)]

        assert [True] * 50 == tiers.set(*hashes)
        tiers.first.batch_delete(SPACE, hashes)
        assert [True] * 50 == tiers.get(*hashes)


def test_a_read_only_storage_promotes_and_heals_nothing(build: Build) -> None:
    tiers = build()
    settings = TieredSettings.parse(
        "tiered", {"tiers": [memory_member("a"), memory_member("b")], "promote": "always"}
    )
    tiers.put(tiers.last, A)
    looking = TieredStorage(dict(zip("ab", tiers.stores, strict=True)), settings, read_only=True)

    assert [True] == looking.batch_get(SPACE, [A], [blank()])
    assert not {"set", "delete"} & {*tiers.first.calls}


def test_an_empty_batch_has_no_answers(build: Build) -> None:
    storage = build().storage

    assert [] == storage.batch_exists(SPACE, [])
    assert [] == storage.batch_get(SPACE, [], [])
    assert [] == storage.batch_set(SPACE, [], [])
    assert [] == storage.batch_delete(SPACE, [])
