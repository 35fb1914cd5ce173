"""Lookups of an engine are combined into batches, and answered in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence

import pytest
from clocks import ends_in
from hicache_backends.memory import MemoryStorage
from job_runners import OTHER, SPACE, Engine, batch, engine
from pages import hash_of, space

from hicache_storage.integrations._jobs import LookupResult
from hicache_storage.keys import KeySpace
from hicache_storage.page_store import Verdict
from hicache_storage.testing import Fault, Odds, WrapperStorage


class _Gated(WrapperStorage):
    """A storage that answers lookups only while the gate is open, and records their pages."""

    def __init__(self) -> None:
        super().__init__(MemoryStorage.from_config({}))
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[tuple[str, int]] = []
        self.opened: list[KeySpace] = []

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.asked.append((space.pool, len(hashes)))
        self.gate.wait(20)
        return super().batch_exists(space, hashes)

    def open_space(self, space: KeySpace) -> None:
        self.opened.append(space)
        super().open_space(space)


@pytest.fixture
def storage() -> _Gated:
    return _Gated()


@pytest.fixture
def jobs(storage: _Gated) -> Generator[Engine]:
    jobs = Engine(storage, lookup_timeout_s=10)
    yield jobs
    storage.gate.set()
    jobs.close()


def submit(jobs: Engine, job_id: int, *numbers: int, of: KeySpace = SPACE) -> None:
    jobs.runner.submit_lookup(job_id, [(of, [hash_of(number) for number in numbers])])


def answers(jobs: Engine, count: int) -> dict[int, list[list[bool]]]:
    results: list[LookupResult] = jobs.fetch(jobs.runner.finished_lookups, count)
    return {result.job_id: result.present for result in results}


def test_each_hash_of_each_query_has_its_answer(jobs: Engine) -> None:
    jobs.save(batch([1, 2]), batch([3], OTHER))
    first = SPACE, [hash_of(number) for number in (2, 3, 1, 2)]
    second = OTHER, [hash_of(number) for number in (1, 3)]

    assert [[True, False, True, True], [False, True]] == jobs.lookup(first, second)


def test_lookups_that_wait_make_one_call_for_each_key_space(jobs: Engine, storage: _Gated) -> None:
    jobs.save(batch([1]), batch([1], OTHER))
    storage.gate.clear()
    for thread in range(2):
        submit(jobs, thread, thread)
        _wait_for_calls(storage, thread + 1)
    for number in range(5):  # both threads wait for the store
        submit(jobs, 10 + number, 1, number)
        submit(jobs, 20 + number, 1, number, of=OTHER)
    storage.gate.set()
    found = answers(jobs, 12)

    assert 4 == len(storage.asked)
    assert {("kv", 5), ("draft", 5)} == set(storage.asked[2:])
    assert [[True, True]] == found[11] == found[21]
    assert [[True, False]] == found[12]


def test_a_malformed_hash_fails_its_own_lookup_only(jobs: Engine, storage: _Gated) -> None:
    jobs.save(batch([1]))
    storage.gate.clear()
    for thread in range(2):
        submit(jobs, thread, thread)
        _wait_for_calls(storage, thread + 1)
    submit(jobs, 2, 1)
    jobs.runner.submit_lookup(3, [(SPACE, ["no hash"])])
    submit(jobs, 4, 1)
    storage.gate.set()
    found = answers(jobs, 5)

    assert ([[True]], [[False]], [[True]]) == (found[2], found[3], found[4])


def test_a_key_space_that_a_lookup_names_is_not_opened(jobs: Engine, storage: _Gated) -> None:
    for number in range(20):
        submit(jobs, number, 1, of=space(tenant=f"salt-{number}"))
    found = answers(jobs, 20)

    assert {False} == {answer for [[answer]] in found.values()}
    assert [0, 0] == [len(storage.opened), jobs.runner.stats()["open_spaces"]]


def test_pages_that_are_too_large_for_the_store_take_no_answer_from_others() -> None:
    with_limit = Engine(MemoryStorage.from_config({"capacity_nbytes": 8192}))
    with_limit.save(batch([1]))
    large = space(page_nbytes=10_000)
    with_limit.runner.submit_lookup(1, [(large, [hash_of(1)]), (SPACE, [hash_of(1)])])

    assert [[Verdict.UNAVAILABLE], [Verdict.OK]] == verdicts(with_limit)
    with_limit.close()


def test_many_lookups_of_a_store_that_hangs_are_misses_at_their_own_deadlines() -> None:
    plan = [Odds("batch_exists", Fault.HANG, 1)]
    with engine(plan, lookup_timeout_s=0.4) as hanging:
        with ends_in(1.5):
            for number in range(50):
                submit(hanging, number, number)
            found = answers(hanging, 50)

        assert {False} == {answer for [[answer]] in found.values()}
        assert hanging.runner.stats()["lookup_pages_unanswered"] == 50


def verdicts(jobs: Engine) -> list[list[Verdict]]:
    (result,) = jobs.fetch(jobs.runner.finished_lookups)
    return result.verdicts


def test_a_page_that_is_not_present_has_its_reason(jobs: Engine) -> None:
    jobs.save(batch([1]))
    submit(jobs, 1, 1, 2)

    assert [[Verdict.OK, Verdict.MISS]] == verdicts(jobs)


@pytest.mark.parametrize(
    ("fault", "verdict"), [(Fault.HANG, Verdict.TIMEOUT), (Fault.RAISE, Verdict.UNAVAILABLE)]
)
def test_a_page_without_an_answer_has_the_reason_of_the_store(
    fault: Fault, verdict: Verdict
) -> None:
    with engine([Odds("batch_exists", fault, 1)], lookup_timeout_s=1) as failing:
        submit(failing, 1, 1)

        assert [[verdict]] == verdicts(failing)


def test_pages_are_counted(jobs: Engine) -> None:
    jobs.save(batch([1]))
    submit(jobs, 1, 1, 2, 3)
    answers(jobs, 1)
    stats = jobs.runner.stats()

    assert (1, 3, 1) == (
        stats["lookup_jobs"],
        stats["lookup_pages"],
        stats["lookup_pages_present"],
    )


def _wait_for_calls(storage: _Gated, count: int) -> None:
    deadline_s = time.monotonic() + 20
    while len(storage.asked) < count:
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
