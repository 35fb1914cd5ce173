from __future__ import annotations

from pages import space

from hicache_storage.page_store.splitting import LatencyEstimator, even_cuts, piece_count

SMALL = space(page_nbytes=4096)
LARGE = space(page_nbytes=4 << 20)


def test_the_first_estimate_is_the_latency_of_a_copy() -> None:
    latency = LatencyEstimator()

    assert latency.min_transfer_pages(SMALL) > 100
    assert latency.min_transfer_pages(LARGE) == 1


def test_a_slow_store_gets_threads_for_small_pages() -> None:
    latency = LatencyEstimator()
    for _ in range(3):
        latency.note(SMALL, pages=10, elapsed_s=0.1)

    assert latency.min_transfer_pages(SMALL) == 1


def test_a_fast_store_gets_one_thread_for_small_pages() -> None:
    latency = LatencyEstimator()
    for _ in range(30):
        latency.note(SMALL, pages=100, elapsed_s=0.001)

    assert latency.min_transfer_pages(SMALL) > 500


def test_some_megabytes_get_a_thread_of_a_fast_store() -> None:
    latency = LatencyEstimator()
    for _ in range(30):
        latency.note(LARGE, pages=100, elapsed_s=0.001)

    assert latency.min_transfer_pages(LARGE) == 2


def test_each_key_space_has_its_own_latency() -> None:
    latency = LatencyEstimator()
    latency.note(LARGE, pages=1, elapsed_s=10)

    assert latency.min_transfer_pages(SMALL) == LatencyEstimator().min_transfer_pages(SMALL)


def test_pieces_are_no_larger_than_requested_and_spread_over_the_threads() -> None:
    assert piece_count(0, threads=4, least=1, most=10) == 0
    assert piece_count(3, threads=4, least=1, most=10) == 3
    assert piece_count(100, threads=4, least=1000, most=1000) == 1
    assert piece_count(100, threads=4, least=50, most=1000) == 2
    assert piece_count(100, threads=4, least=1, most=10) == 12
    assert [slice(0, 3), slice(3, 6), slice(6, 10)] == list(even_cuts(10, 3))
    assert list(even_cuts(0, 0)) == []
