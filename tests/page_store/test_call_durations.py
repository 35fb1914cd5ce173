from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from framed import TARGET, framed
from pages import hash_of
from stores import HookedStorage, failing

from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.page_store import PageStore, PageStoreSettings, PoolSpec, Transfer, Verdict
from hicache_storage.page_store.call_durations import BUCKETS_S, OPERATIONS, CallDurations

ALL = [hash_of(number) for number in range(3)]


def test_a_call_is_in_the_first_bucket_that_holds_it() -> None:
    durations = CallDurations()
    for elapsed_s in (0.0, BUCKETS_S[1], 1e6):
        durations.note("load", [Verdict.OK], elapsed_s)

    counts = durations.snapshot()["load", Verdict.OK].counts
    assert (1, 1, 1) == (counts[0], counts[1], counts[len(BUCKETS_S)])


def test_the_times_of_all_calls_add_up() -> None:
    durations = CallDurations()
    for _ in range(4):
        durations.note("save", [Verdict.OK], 0.25)

    assert 1.0 == durations.snapshot()["save", Verdict.OK].total_s


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_call_without_pages_is_not_counted(operation: str) -> None:
    durations = CallDurations()
    durations.note(operation, [], 1.0)  # type: ignore[arg-type]  # one of OPERATIONS

    assert {} == durations.snapshot()


@pytest.mark.parametrize("verdict", sorted(set(Verdict) - {Verdict.OK}, key=str))
def test_every_verdict_is_worse_than_ok(verdict: Verdict) -> None:
    durations = CallDurations()
    durations.note("load", [Verdict.OK, verdict, Verdict.OK], 1.0)

    assert {("load", verdict)} == set(durations.snapshot())


def test_threads_lose_no_call() -> None:
    durations = CallDurations()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2000):
            pool.submit(durations.note, "match", [Verdict.OK], 0.001)

    assert 2000 == sum(durations.snapshot()["match", Verdict.OK].counts)


def test_a_page_store_counts_each_of_its_calls_once() -> None:
    with PageStore(HookedStorage()) as store:
        store.open_space(TARGET)
        transfer = Transfer(TARGET, ALL, [framed(1) for _ in ALL])
        store.save([transfer])
        store.match(ALL, [PoolSpec(space=TARGET)])
        store.present(TARGET, ALL)
        store.load([transfer])

        assert {
            ("save", Verdict.OK): 1,
            ("match", Verdict.OK): 2,
            ("load", Verdict.OK): 1,
        } == {key: sum(each.counts) for key, each in store.durations().items()}


@pytest.mark.parametrize(
    ("error", "verdict"),
    [(StorageUnavailable("gone"), Verdict.UNAVAILABLE), (StorageTimeout("slow"), Verdict.TIMEOUT)],
)
def test_a_failed_call_is_counted_by_its_verdict(error: Exception, verdict: Verdict) -> None:
    storage = HookedStorage()
    storage.hooks["batch_exists"] = storage.hooks["batch_get"] = failing(error)
    with PageStore(storage, PageStoreSettings(breaker_failures=2)) as store:
        store.open_space(TARGET)
        store.match(ALL, [PoolSpec(space=TARGET)])
        for _ in range(2):
            store.load([Transfer(TARGET, ALL, [framed(1) for _ in ALL])])

        assert {
            ("match", verdict),
            ("load", verdict),
            ("load", Verdict.BREAKER_OPEN),
        } == set(store.durations())


def test_pages_are_counted_by_the_answers_of_a_match() -> None:
    storage = HookedStorage()
    with PageStore(storage) as store:
        store.open_space(TARGET)
        store.save([Transfer(TARGET, ALL[:2], [framed(1), framed(2)])])
        store.match(ALL, [PoolSpec(space=TARGET)])
        storage.hooks["batch_exists"] = failing(StorageUnavailable("gone"))
        store.match(ALL, [PoolSpec(space=TARGET)])

        stats = store.stats()
    assert (2, 1, 3) == tuple(
        stats[f"match_{answer}"] for answer in ("present", "absent", "unanswered")
    )
