from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hicache_storage.backend_support.counters import Counters


def test_counts_add_up_by_name() -> None:
    counters = Counters()
    counters.add("hits")
    counters.add("hits", 3)
    counters.add("misses", 2)

    assert {"hits": 4, "misses": 2} == counters.snapshot()


def test_a_counter_at_zero_is_left_out() -> None:
    counters = Counters()
    counters.add("hits", 0)

    assert {} == counters.snapshot()


def test_a_snapshot_does_not_change() -> None:
    counters = Counters()
    counters.add("hits")
    snapshot = counters.snapshot()
    counters.add("hits")

    assert {"hits": 1} == snapshot


def test_additions_of_several_threads_are_all_counted() -> None:
    counters = Counters()

    def add() -> None:
        for _ in range(1000):
            counters.add("hits")

    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(add)

    assert {"hits": 4000} == counters.snapshot()
