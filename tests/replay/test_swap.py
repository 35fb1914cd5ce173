"""A swap of the storage while requests run: no wrong byte, and hits in the second storage."""

from __future__ import annotations

from typing import Any

import pytest
from hicache_backends.memory import MemoryStorage
from stores import HookedStorage

from hicache_storage.controller import ControllerSettings, PrefetchPolicy, WritePolicy
from hicache_storage.errors import StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.replay.driver import Replay, ReplaySettings
from hicache_storage.replay.models import KVShape, PoolShape
from hicache_storage.replay.trace import synthetic_trace
from hicache_storage.storage import Capabilities, HiCacheStorage

_POOLS = (PoolShape("kv", KVShape("mha", 3, 2, 2)), PoolShape("draft", KVShape("mha", 1, 1, 2)))
_TRACE = synthetic_trace(0, conversations=14)
_HALF = len(_TRACE) // 2


class _Unreachable(HookedStorage):
    """A storage that can't open a key space."""

    def open_space(self, space: KeySpace) -> None:
        raise StorageUnavailable("the second store is down")


def settings(write_policy: WritePolicy = WritePolicy.WRITE_THROUGH) -> ReplaySettings:
    page_nbytes = sum(pool.shape.page(64).nbytes for pool in _POOLS)
    return ReplaySettings(
        model="m",
        pools=_POOLS,
        host_nbytes=200 * page_nbytes,
        controller=ControllerSettings(
            prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
            prefetch_threshold_tokens=0,
            write_policy=write_policy,
        ),
    )


def swapped(
    first: HiCacheStorage,
    second: HiCacheStorage,
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
) -> dict[str, Any]:
    with Replay(first, settings(write_policy), next_storage=second) as replay:
        assert replay.run(_TRACE, swap_after=_HALF)
        assert replay.swap is not None
        return {**replay.figures(), "swap": replay.swap.figures()}


@pytest.mark.parametrize("policy", WritePolicy, ids=lambda policy: policy.value)
def test_no_byte_is_wrong_and_the_second_storage_is_used(policy: WritePolicy) -> None:
    report = swapped(MemoryStorage(), MemoryStorage(), policy)

    assert report["corrupt_pages"] == 0
    assert report["requests"] == len(_TRACE)
    assert report["swap"]["drained"]
    assert report["swap"]["attached"]
    assert report["swap"]["store"]["save_ok"] > 0
    assert report["swap"]["store"]["load_ok"] > 0


def test_pages_that_the_first_storage_refused_are_reported() -> None:
    first = HookedStorage()
    first.hooks["batch_set"] = lambda answer: [False] * len(answer())

    report = swapped(first, MemoryStorage(), WritePolicy.WRITE_BACK)

    assert not report["swap"]["drained"]
    assert report["swap"]["attached"]


def test_the_first_storage_gets_no_call_after_the_swap() -> None:
    first = HookedStorage()
    with Replay(first, settings(), next_storage=MemoryStorage()) as replay:
        replay.run(_TRACE[:_HALF], swap_after=1)
        before = dict(first.calls)
        replay.run(_TRACE[_HALF:])

        assert before == dict(first.calls)


def test_bytes_moved_are_those_of_both_storages() -> None:
    report = swapped(MemoryStorage(), MemoryStorage())

    both = [report["store"], report["swap"]["store"]]
    for flow, counter in (("l3_read", "load_nbytes"), ("l3_write", "save_nbytes")):
        assert report[flow]["nbytes"] == sum(store[counter] for store in both)


def test_a_second_storage_that_is_down_leaves_l2_alone() -> None:
    report = swapped(MemoryStorage(), _Unreachable())

    assert report["corrupt_pages"] == 0
    assert report["requests"] == len(_TRACE)
    assert not report["swap"]["attached"]
    assert "the second store is down" in report["swap"]["complaint"]


def test_a_storage_with_another_alignment_takes_over() -> None:
    report = swapped(MemoryStorage(), HookedStorage(Capabilities(alignment=4096)))

    assert report["swap"]["attached"]
    assert report["corrupt_pages"] == 0


def test_a_run_that_ends_before_the_swap_reports_it() -> None:
    with Replay(MemoryStorage(), settings(), next_storage=MemoryStorage()) as replay:
        replay.run(_TRACE[:3], swap_after=5)
        assert replay.swap is not None
        assert not replay.swap.figures()["begun"]
