"""Which pages the controller writes to the store, and which it does not."""

from __future__ import annotations

import pytest
from engines import PROMPT, cache_pools, compute, engine_on, leaked, optional_draft, until
from hicache_backends.memory import MemoryStorage
from pages import hash_of
from stores import HookedStorage

from hicache_storage.controller import CacheController, CachePool, WritePolicy
from hicache_storage.page_store.admission import (
    NOT_ADMITTED_FIRST_USE,
    NOT_ADMITTED_RATE,
    Admission,
    AdmissionSettings,
)
from hicache_storage.storage import HiCacheStorage

FEW = PROMPT[:4]
OTHERS = [hash_of(1000 + number) for number in range(32)]


def second_use() -> Admission:
    return Admission(AdmissionSettings(second_use=True, remembered_pages=1000))


def stored(storage: HiCacheStorage, pool: str = "kv") -> list[int]:
    """Return which of `PROMPT` the storage has, by number."""
    spaces = [space for space in storage.spaces() if space.pool == pool]
    there = {info.page_hash for space in spaces for info in storage.scan(space)}
    return [number for number, page_hash in enumerate(PROMPT) if page_hash in there]


def forget(engine: CacheController) -> None:
    """Fill L2 with other pages, so that it evicts all earlier ones."""
    compute(engine, OTHERS)


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage.from_config({})


@pytest.mark.parametrize("pools", [cache_pools, optional_draft])
def test_a_page_is_written_when_it_is_computed_again(
    storage: MemoryStorage, pools: type[list[CachePool]]
) -> None:
    with engine_on(storage, pools(), admission=second_use()) as engine:
        compute(engine, FEW)
        assert engine.drain(20)
        assert [] == stored(storage)
        forget(engine)
        compute(engine, FEW)
        assert engine.drain(20)

        assert [0, 1, 2, 3] == stored(storage) == stored(storage, "draft")
        assert 4 + 32 == engine.stats()[NOT_ADMITTED_FIRST_USE]
        assert not leaked(engine)


def test_a_page_is_written_when_l2_has_it_for_a_second_request(storage: MemoryStorage) -> None:
    with engine_on(storage, cache_pools(), admission=second_use()) as engine:
        compute(engine, FEW)
        engine.prefetch("r", PROMPT[:2]).result().release()
        assert engine.drain(20)

        assert [0, 1] == stored(storage)


def test_a_selective_policy_has_seen_the_second_use_itself(storage: MemoryStorage) -> None:
    with engine_on(
        storage,
        cache_pools(),
        admission=second_use(),
        write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE,
    ) as engine:
        compute(engine, FEW)
        engine.prefetch("r", FEW).result().release()
        assert engine.drain(20)

        assert [0, 1, 2, 3] == stored(storage)


def test_an_evicted_page_that_was_used_twice_is_written(storage: MemoryStorage) -> None:
    with engine_on(
        storage, cache_pools(), admission=second_use(), write_policy=WritePolicy.WRITE_BACK
    ) as engine:
        compute(engine, FEW)
        engine.prefetch("r", PROMPT[:2]).result().release()
        forget(engine)
        assert engine.drain(20)

        assert [0, 1] == stored(storage)
        assert not leaked(engine)


def test_close_writes_back_admitted_pages_only(storage: MemoryStorage) -> None:
    with engine_on(
        storage, cache_pools(), admission=second_use(), write_policy=WritePolicy.WRITE_BACK
    ) as engine:
        compute(engine, FEW)
        engine.prefetch("r", PROMPT[:2]).result().release()
        assert engine.close()

        assert [0, 1] == stored(storage)


def test_the_rate_admits_the_first_pages(storage: MemoryStorage) -> None:
    pools = cache_pools()
    page_nbytes = sum(pool.space.page_nbytes for pool in pools)
    settings = AdmissionSettings(write_nbytes_per_s=1, write_burst_nbytes=3 * page_nbytes)
    with engine_on(storage, pools, admission=Admission(settings, clock=lambda: 0)) as engine:
        compute(engine, FEW)
        assert engine.drain(20)

        assert [0, 1, 2] == stored(storage)
        assert 1 == engine.stats()[NOT_ADMITTED_RATE]


def test_a_new_engine_knows_the_pages_of_the_one_before() -> None:
    storage = HookedStorage()
    with engine_on(storage, cache_pools(), admission=second_use()) as engine:
        compute(engine, FEW)
    assert [] == stored(storage.inner)

    admission = second_use()
    with engine_on(storage, cache_pools(), admission=admission) as engine:
        until(lambda: any(pages for _, pages in admission.states()))
        compute(engine, FEW)
        assert engine.drain(20)

    assert [0, 1, 2, 3] == stored(storage.inner)
