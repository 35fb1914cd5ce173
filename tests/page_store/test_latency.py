from __future__ import annotations

from pages import space

from hicache_storage.page_store.latency import LatencyEstimator

SMALL = space(page_nbytes=4096)
LARGE = space(page_nbytes=4 << 20)


def test_until_it_is_seen_a_store_is_as_fast_as_a_copy() -> None:
    pace = LatencyEstimator()

    assert pace.least_pages(SMALL) > 100
    assert pace.least_pages(LARGE) == 1


def test_a_slow_store_is_worth_threads_for_small_pages() -> None:
    pace = LatencyEstimator()
    for _ in range(3):
        pace.note(SMALL, pages=10, elapsed_s=0.1)

    assert pace.least_pages(SMALL) == 1


def test_a_store_that_turns_out_to_be_quick_is_not() -> None:
    pace = LatencyEstimator()
    for _ in range(30):
        pace.note(SMALL, pages=100, elapsed_s=0.001)

    assert pace.least_pages(SMALL) > 500


def test_some_megabytes_are_worth_a_thread_however_quick_the_store() -> None:
    pace = LatencyEstimator()
    for _ in range(30):
        pace.note(LARGE, pages=100, elapsed_s=0.001)

    assert pace.least_pages(LARGE) == 2


def test_key_spaces_have_paces_of_their_own() -> None:
    pace = LatencyEstimator()
    pace.note(LARGE, pages=1, elapsed_s=10)

    assert pace.least_pages(SMALL) == LatencyEstimator().least_pages(SMALL)
