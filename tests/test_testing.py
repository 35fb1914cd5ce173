from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hicache_backends.memory import MemoryStorage
from pages import blank, hash_of, page, space

from hicache_storage.errors import StorageClosed, StorageUnavailable, UnsupportedOperation
from hicache_storage.page import Page
from hicache_storage.testing import Fault, FaultyStorage, Odds, Strike

SPACE = space()
HASHES = [hash_of(number) for number in range(4)]


def faulty(operation: str, fault: Fault, *, call: int = 0, seed: int = 0) -> FaultyStorage:
    return FaultyStorage(MemoryStorage(), [Strike(operation, call, fault)], seed=seed)


def pages() -> list[Page]:
    return [page(seed=number) for number in range(4)]


def differing_bits(first: Page, second: Page) -> int:
    pairs = zip(first.tobytes(), second.tobytes(), strict=True)
    return sum((a ^ b).bit_count() for a, b in pairs)


def test_only_the_chosen_call_is_struck() -> None:
    storage = faulty("batch_set", Fault.MISS, call=1)

    answers = [storage.batch_set(SPACE, HASHES, pages())[0] for _ in range(3)]

    assert [True, False, True] == answers
    assert storage.calls["batch_set"] == 3


def test_a_storage_that_damages_pages_is_not_revocable() -> None:
    inner = MemoryStorage()
    vars(inner)["capabilities"] = replace(inner.capabilities, revocable=True)

    assert not FaultyStorage(inner).capabilities.revocable


def test_raise_does_nothing() -> None:
    storage = faulty("batch_set", Fault.RAISE)

    with pytest.raises(StorageUnavailable, match="batch_set"):
        storage.batch_set(SPACE, HASHES, pages())

    assert [False] * 4 == storage.batch_exists(SPACE, HASHES)


def test_a_lie_stores_nothing() -> None:
    storage = faulty("batch_set", Fault.LIE)

    assert [True] * 4 == storage.batch_set(SPACE, HASHES, pages())
    assert [False] * 4 == storage.batch_exists(SPACE, HASHES)


@pytest.mark.parametrize("operation", ["batch_set", "batch_get"])
def test_a_flip_changes_one_bit_of_one_page(operation: str) -> None:
    storage = faulty(operation, Fault.FLIP)
    sent, got = pages(), [blank() for _ in HASHES]
    storage.batch_set(SPACE, HASHES, sent)

    assert [True] * 4 == storage.batch_get(SPACE, HASHES, got)

    assert [0, 0, 0, 1] == sorted(map(differing_bits, pages(), got))
    assert [0] * 4 == list(map(differing_bits, pages(), sent))


def test_a_tear_zeroes_the_second_half_of_one_page() -> None:
    storage = faulty("batch_set", Fault.TEAR)
    got = [blank() for _ in HASHES]
    storage.batch_set(SPACE, HASHES, pages())
    storage.batch_get(SPACE, HASHES, got)

    torn = [each for each, whole in zip(got, pages(), strict=True) if differing_bits(each, whole)]

    assert len(torn) == 1
    assert bytes(2048) == torn[0].tobytes()[2048:]


def test_the_same_seed_strikes_the_same_bit() -> None:
    results: list[list[bytes]] = []
    for _ in range(2):
        storage = faulty("batch_get", Fault.FLIP, seed=7)
        got = [blank() for _ in HASHES]
        storage.batch_set(SPACE, HASHES, pages())
        storage.batch_get(SPACE, HASHES, got)
        results.append([each.tobytes() for each in got])

    assert results[0] == results[1]


def test_a_hang_ends_with_release() -> None:
    storage = faulty("batch_exists", Fault.HANG)
    answers: list[bool] = []
    caller = threading.Thread(target=lambda: answers.extend(storage.batch_exists(SPACE, HASHES)))
    caller.start()
    caller.join(0.05)
    assert caller.is_alive()

    storage.release()
    caller.join(20)

    assert [False] * 4 == answers


def test_closing_releases_and_closes_what_is_inside() -> None:
    storage = faulty("batch_get", Fault.HANG)
    storage.close()

    with pytest.raises(StorageClosed):
        storage.batch_exists(SPACE, HASHES)


def test_it_is_not_built_from_a_config() -> None:
    with pytest.raises(UnsupportedOperation):
        FaultyStorage.from_config({})


def test_a_hang_may_have_an_end() -> None:
    storage = FaultyStorage(MemoryStorage(), [Strike("batch_exists", 0, Fault.HANG)], hang_s=0.01)

    assert [False] * 4 == storage.batch_exists(SPACE, HASHES)


def answers_by_odds(share: float, seed: int, calls: int = 400) -> list[bool]:
    """Return for each call whether it reported a page that is absent as present."""
    with FaultyStorage(MemoryStorage(), [Odds("batch_exists", Fault.LIE, share)], seed=seed) as it:
        answers = [it.batch_exists(SPACE, HASHES[:1])[0] for _ in range(calls)]
        assert it.struck["batch_exists", Fault.LIE] == sum(answers)
    return answers


def test_odds_strike_about_their_share_of_the_calls() -> None:
    assert 20 < sum(answers_by_odds(0.1, seed=3)) < 60
    assert sum(answers_by_odds(0, seed=3)) == 0
    assert sum(answers_by_odds(1, seed=3)) == 400


def test_the_seed_decides_which_calls() -> None:
    assert answers_by_odds(0.1, seed=3) == answers_by_odds(0.1, seed=3)
    assert answers_by_odds(0.1, seed=3) != answers_by_odds(0.1, seed=4)


def test_odds_of_other_operations_are_not_meant() -> None:
    storage = FaultyStorage(MemoryStorage(), [Odds("batch_get", Fault.RAISE, 1.0)])

    assert [False] * 4 == storage.batch_exists(SPACE, HASHES)


def test_calls_without_faults_are_passed_on() -> None:
    with FaultyStorage(MemoryStorage()) as storage:
        storage.batch_set(SPACE, HASHES, pages())

        assert [SPACE] == list(storage.spaces())
        assert set(HASHES) == {info.page_hash for info in storage.scan(SPACE)}
        assert storage.clear(SPACE) == 4
