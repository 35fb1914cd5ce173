"""Jobs of an engine: verdicts, deadlines, order, and the end of all of them."""

from __future__ import annotations

import operator
import random
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from clocks import ends_in
from hicache_backends.file import FileStorage
from hicache_backends.memory import MemoryStorage
from job_runners import OTHER, SPACE, Engine, batch, contents, engine, target
from pages import blank, hash_of, page
from servers import wait_until

from hicache_storage.errors import ConfigError, StorageUnavailable
from hicache_storage.integrations._jobs import JobKind, JobRunner, JobSettings
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, Transfer
from hicache_storage.page_store.results import Verdict
from hicache_storage.storage import HiCacheStorage
from hicache_storage.testing import Fault, Odds, Strike, WrapperStorage

OPERATIONS = ("batch_exists", "batch_get", "batch_set", "batch_delete")

OK, MISS, TIMEOUT, REFUSED = Verdict.OK, Verdict.MISS, Verdict.TIMEOUT, Verdict.REFUSED
NOT_ADMITTED = Verdict.NOT_ADMITTED


class _Raising(MemoryStorage):
    """A storage that raises one kind of error in every call."""

    error: BaseException = RuntimeError("unexpected")

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        raise self.error

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        raise self.error

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        raise self.error


class _Counted(Sequence[str]):
    """A list of hashes that records which threads read it."""

    def __init__(self, hashes: list[str]) -> None:
        self.hashes = hashes
        self.readers: set[str] = set()

    def __len__(self) -> int:
        return len(self.hashes)

    def __getitem__(self, index: Any) -> Any:
        self.readers.add(threading.current_thread().name)
        return operator.getitem(self.hashes, index)


# --- pages ----------------------------------------------------------------------------------------


def test_pages_of_several_key_spaces_are_loaded_as_they_were_stored() -> None:
    stored = batch(range(5)), batch(range(3), OTHER)
    found = target(range(5)), target(range(3), OTHER)
    with engine() as jobs:
        saved = jobs.save(*stored)
        loaded = jobs.load(*found)

    assert [[OK] * 5, [OK] * 3] == saved.verdicts == loaded.verdicts
    assert 5 * 4096 + 3 * 1000 == saved.nbytes == loaded.nbytes
    assert [contents(each) for each in stored] == [contents(each) for each in found]


def test_pages_are_moved_over_files(tmp_path: Path) -> None:
    storage = FileStorage.from_config({"path": str(tmp_path)})
    jobs = Engine(storage)
    stored, found = batch(range(20)), target(range(20))
    jobs.save(stored)

    assert [[OK] * 20] == jobs.load(found).verdicts
    assert contents(stored) == contents(found)
    jobs.close()


def test_a_job_larger_than_a_piece_is_moved_whole() -> None:
    stored, found = batch(range(100)), target(range(100))
    with engine(queued_nbytes="512KiB") as jobs:
        verdicts = jobs.save(stored).verdicts, jobs.load(found).verdicts

    assert ([[OK] * 100], [[OK] * 100]) == verdicts
    assert contents(stored) == contents(found)


def test_each_page_has_its_own_verdict() -> None:
    found = target([0, 7, 1])
    with engine() as jobs:
        jobs.save(batch([0, 1]))

        assert [[OK, MISS, OK]] == jobs.load(found).verdicts
    assert [page(seed=0).tobytes(), page(seed=1).tobytes()] == contents(found)[::2]


def test_a_damaged_page_is_corrupt() -> None:
    with engine([Strike("batch_get", 0, Fault.FLIP)]) as jobs:
        jobs.save(batch([0]))

        assert [[Verdict.CORRUPT]] == jobs.load(target([0])).verdicts


def test_a_damaged_page_never_reaches_the_engines_memory() -> None:
    found = target([0])
    with engine([Strike("batch_get", 0, Fault.TEAR)]) as jobs:
        jobs.save(batch([0]))
        jobs.load(found)

    assert [blank().tobytes()] == contents(found)


def test_jobs_without_pages_are_reported() -> None:
    with engine() as jobs:
        assert [[]] == jobs.lookup((SPACE, []))
        assert ([], [[]]) == (jobs.load().verdicts, jobs.save(batch([])).verdicts)


# --- deadlines --------------------------------------------------------------------------------


def test_by_default_a_lookup_that_hangs_is_a_miss_within_a_second_and_a_half() -> None:
    with engine([Odds("batch_exists", Fault.HANG, 1)]) as jobs, ends_in(1.5):
        assert [[False]] == jobs.lookup((SPACE, [hash_of(0)]))


def test_by_default_a_load_that_hangs_is_given_up_within_three_seconds() -> None:
    with engine([Odds("batch_get", Fault.HANG, 1)]) as jobs, ends_in(3):
        assert [[TIMEOUT]] == jobs.load(target([0])).verdicts


def test_loads_beyond_the_threads_are_given_up_by_their_own_deadlines() -> None:
    with engine([Odds("batch_get", Fault.HANG, 1)], load_timeout_s=0.5) as jobs:
        jobs.save(batch(range(20)))
        with ends_in(2):
            for number in range(20):
                jobs.runner.submit_load(number, [target([number])])
            results = jobs.fetch(jobs.runner.finished_loads, 20)
    assert {TIMEOUT} == {verdict for result in results for (verdict,) in result.verdicts}


def test_a_load_that_hangs_does_not_delay_the_next_one() -> None:
    with engine([Strike("batch_get", 0, Fault.HANG)], load_timeout_s=30) as jobs:
        jobs.save(batch([0]))
        jobs.runner.submit_load(1, [target([0])])
        wait_until(lambda: jobs.storage.calls["batch_get"] == 1)  # type: ignore[attr-defined]

        jobs.runner.submit_load(2, [target([0])])
        (result,) = jobs.fetch(jobs.runner.finished_loads)
        assert (2, [[OK]]) == (result.job_id, result.verdicts)


def test_a_late_write_never_reaches_the_engines_memory() -> None:
    found = target(range(3))
    with engine([Strike("batch_get", 0, Fault.HANG)], load_timeout_s=0.2) as jobs:
        jobs.save(batch(range(3)))

        assert [[TIMEOUT] * 3] == jobs.load(found).verdicts
        jobs.storage.release()  # type: ignore[attr-defined]
        wait_until(lambda: not jobs.runner.stats()["private_nbytes_used"])
    assert [blank().tobytes()] * 3 == contents(found)


def test_a_late_write_stores_the_bytes_that_the_job_had() -> None:
    stored = batch([0])
    with engine([Strike("batch_set", 0, Fault.HANG)], store_timeout_s=1) as jobs:
        assert [[TIMEOUT]] == jobs.save(stored).verdicts
        stored.pages[0].copy_from(bytes(4096))  # the engine uses the page for something else
        jobs.storage.release()  # type: ignore[attr-defined]
        wait_until(lambda: jobs.lookup((SPACE, [hash_of(0)])) == [[True]])
        found = target([0])
        jobs.load(found)

    assert contents(batch([0])) == contents(found)


class _Stalled(WrapperStorage):
    """A revocable storage whose gets or sets hang, before their pages move, until `released` is set."""

    def __init__(self, inner: HiCacheStorage, *operations: str) -> None:
        super().__init__(inner)
        self.released = threading.Event()
        self._operations = operations

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._stall("batch_get")
        return super().batch_get(space, hashes, pages)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._stall("batch_set")
        return super().batch_set(space, hashes, pages)

    def close(self) -> None:
        self.released.set()
        super().close()

    def _stall(self, operation: str) -> None:
        if operation in self._operations:
            self.released.wait(30)


@pytest.fixture
def stalled(tmp_path: Path) -> Generator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(*operations: str, **settings: Any) -> Engine:
        storage = _Stalled(FileStorage.from_config({"path": str(tmp_path)}), *operations)
        engines.append(Engine(storage, **settings))
        return engines[-1]

    yield make
    for each in engines:
        each.storage.released.set()  # type: ignore[attr-defined]
        each.close()


def _used_again(batch: Transfer) -> list[bytes]:
    """Overwrite the engine's memory as its next use would. Return the new bytes."""
    for each in batch.pages:
        each.copy_from(b"\xff" * each.nbytes)
    return contents(batch)


def _settle(jobs: Engine) -> None:
    """Let the hanging calls go on, and wait until they have ended and freed their headers."""
    jobs.storage.released.set()  # type: ignore[attr-defined]
    wait_until(lambda: not jobs.runner.stats()["private_nbytes_used"])


def test_a_load_of_a_hung_revocable_store_loses_the_memory_at_its_deadline(
    stalled: Callable[..., Engine],
) -> None:
    jobs = stalled("batch_get", load_timeout_s=0.3)
    jobs.save(batch(range(4)))
    found = target(range(4))

    with ends_in(5):
        assert [[TIMEOUT] * 4] == jobs.load(found).verdicts
    expected = _used_again(found)
    _settle(jobs)
    assert expected == contents(found)
    assert [[OK] * 4] == jobs.load(target(range(4))).verdicts


def test_a_store_to_a_hung_revocable_store_loses_the_memory_at_its_deadline(
    stalled: Callable[..., Engine],
) -> None:
    jobs = stalled("batch_set", store_timeout_s=0.3)
    stored = batch(range(4))

    assert [[TIMEOUT] * 4] == jobs.save(stored).verdicts
    _used_again(stored)
    _settle(jobs)
    assert [[MISS] * 4] == jobs.load(target(range(4))).verdicts


def test_close_ends_the_access_of_a_hung_revocable_store(stalled: Callable[..., Engine]) -> None:
    jobs = stalled("batch_get", load_timeout_s=0.3)
    jobs.save(batch([0]))
    jobs.runner.submit_load(1, [target([0])])

    assert jobs.runner.close()


def test_pieces_after_one_without_an_answer_are_not_tried() -> None:
    plan = [Strike("batch_get", 0, Fault.RAISE)]
    with engine(plan, queued_nbytes="64KiB") as jobs:
        jobs.save(batch(range(50)))
        verdicts = jobs.load(target(range(50))).verdicts[0]

        assert jobs.storage.calls["batch_get"] < 50  # type: ignore[attr-defined]
    assert Verdict.UNAVAILABLE in verdicts


# --- order and room -------------------------------------------------------------------------------


def test_a_store_that_finds_no_room_is_refused_and_counted() -> None:
    plan = [Odds("batch_set", Fault.HANG, 1)]
    with engine(plan, queued_nbytes="64KiB") as jobs:
        for number in range(40):
            jobs.runner.submit_store(number, [batch([number])])
        dropped = jobs.runner.finished_stores()

        assert {REFUSED} == {verdict for result in dropped for (verdict,) in result.verdicts}
        assert jobs.runner.stats()["store_jobs_dropped"] >= 40 - 16 - 2
        assert jobs.runner.stats()["queued_store_nbytes"] <= 64 << 10


def test_a_store_of_any_size_finds_room_where_none_waits() -> None:
    with engine(queued_nbytes="64KiB") as jobs:
        pages = range((64 << 10) // SPACE.page_nbytes + 1)

        assert {OK} == set(jobs.save(batch(pages)).verdicts[0])


def test_loads_that_hang_do_not_delay_others_while_a_thread_is_left() -> None:
    plan = [Strike("batch_get", number, Fault.HANG) for number in range(3)]
    with engine(plan, load_timeout_s=30) as jobs:
        jobs.save(batch([0, 1]))
        for number in range(3):
            jobs.runner.submit_load(number, [target([0])])
        wait_until(lambda: jobs.storage.calls["batch_get"] == 3)  # type: ignore[attr-defined]
        for number in range(8):
            jobs.runner.submit_load(10 + number, [target([0])])

        small = jobs.fetch(jobs.runner.finished_loads, 8)
        assert {(10 + number, OK) for number in range(8)} == {
            (result.job_id, result.verdicts[0][0]) for result in small
        }
        jobs.storage.release()  # type: ignore[attr-defined]


def test_no_store_begins_while_a_load_waits_for_a_thread() -> None:
    plan = [Strike("batch_get", number, Fault.HANG) for number in range(4)]
    with engine(plan, load_timeout_s=30, store_timeout_s=30) as jobs:
        jobs.save(batch([0]))
        for number in range(5):
            jobs.runner.submit_load(number, [target([0])])
        jobs.runner.submit_store(9, [batch([1])])
        wait_until(lambda: jobs.storage.calls["batch_get"] == 4)  # type: ignore[attr-defined]

        assert 1 == jobs.storage.calls["batch_set"]  # type: ignore[attr-defined]
        jobs.storage.release()  # type: ignore[attr-defined]
        (stored,) = jobs.fetch(jobs.runner.finished_stores)
        assert [[OK]] == stored.verdicts


def test_a_store_is_given_up_at_its_deadline_while_loads_wait() -> None:
    plan = [Odds("batch_get", Fault.HANG, 1)]
    with engine(plan, load_timeout_s=30, store_timeout_s=0.3) as jobs:
        for number in range(5):
            jobs.runner.submit_load(number, [target([0])])

        assert [[TIMEOUT]] == jobs.save(batch([1])).verdicts


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [StorageUnavailable("down"), RuntimeError("odd"), MemoryError(), SystemExit(), OSError(5)],
    ids=lambda error: type(error).__name__,
)
def test_a_storage_may_raise_anything(error: BaseException) -> None:
    storage = _Raising.from_config({})
    storage.error = error
    jobs = Engine(storage)

    assert [[False]] == jobs.lookup((SPACE, [hash_of(0)]))
    assert OK not in [jobs.load(target([0])).verdicts[0][0], jobs.save(batch([0])).verdicts[0][0]]
    jobs.close()


@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.value)
def test_every_fault_at_every_call_ends_in_verdicts_and_right_bytes(fault: Fault) -> None:
    for operation in OPERATIONS:
        for call in range(4):
            strike = Strike(operation, call, fault)
            with engine(
                [strike],
                lookup_timeout_s=0.1,
                load_timeout_s=0.4,
                store_timeout_s=0.2,
            ) as jobs:
                _scenario(jobs)
                assert jobs.runner.drain(10)
                assert jobs.runner.close()


def _scenario(jobs: Engine) -> None:
    """Store pages, look them up and load them twice. Every page that is OK must have the right bytes."""
    for _ in range(2):
        jobs.save(batch(range(4)), batch(range(2), OTHER))
        found = target(range(4)), target(range(2), OTHER)
        present = jobs.lookup((SPACE, found[0].hashes), (OTHER, found[1].hashes))
        assert [4, 2] == [len(answers) for answers in present]
        loaded = jobs.load(*found)
        for each, verdicts in zip(found, loaded.verdicts, strict=True):
            for number, verdict in enumerate(verdicts):
                expected = page(each.space.page_nbytes, number).tobytes()
                assert verdict is not OK or expected == each.pages[number].tobytes()


@pytest.mark.parametrize("seed", range(3))
def test_each_of_many_jobs_is_reported_once_over_a_bad_store(seed: int) -> None:
    draw = random.Random(seed)
    faults = [fault for fault in Fault if fault is not Fault.HANG]
    plan = [Odds(operation, fault, 0.01) for operation in OPERATIONS for fault in faults]
    loads: dict[int, Transfer] = {}
    with engine(plan, queued_nbytes="512KiB") as jobs:
        runner = jobs.runner
        stored: list[Any] = []
        loaded: list[Any] = []
        found: list[Any] = []
        for job_id in range(200):
            numbers = draw.sample(range(60), draw.randrange(1, 30))
            loads[job_id] = target(numbers)
            runner.submit_store(job_id, [batch(numbers)])
            runner.submit_lookup(job_id, [(SPACE, loads[job_id].hashes)])
            runner.submit_load(job_id, [loads[job_id]])
            for results, finished in (
                (stored, runner.finished_stores),
                (loaded, runner.finished_loads),
                (found, runner.finished_lookups),
            ):
                results.extend(finished())
            if not job_id % 10:
                assert runner.drain(60)
        assert runner.drain(60)
        stored += runner.finished_stores()
        loaded += runner.finished_loads()
        found += runner.finished_lookups()
        assert runner.close()
        stats = runner.stats()

    assert [list(range(200))] * 3 == [
        sorted(result.job_id for result in results) for results in (stored, loaded, found)
    ]
    assert (200, 200, 200) == (stats["store_jobs"], stats["load_jobs"], stats["lookup_jobs"])
    assert (0, 0) == (stats["private_nbytes_used"], stats["queued_store_nbytes"])
    right = {hash_of(number): page(4096, number).tobytes() for number in range(60)}
    moved = 0
    for result in loaded:
        into = loads[result.job_id]
        for page_hash, each, verdict in zip(
            into.hashes, into.pages, result.verdicts[0], strict=True
        ):
            if verdict is OK:
                moved += 1
                assert right[page_hash] == each.tobytes()
    assert moved > 500


@pytest.mark.parametrize("batches", [None, [None], [Transfer(SPACE, ["00"], [])], 7])
@pytest.mark.parametrize("admission", [{}, {"second_use": True}], ids=["all", "second use"])
def test_a_malformed_job_is_reported_without_an_error_in_the_engines_thread(
    batches: Any, admission: dict[str, Any]
) -> None:
    with engine(admission=admission) as jobs:
        jobs.runner.submit_load(1, batches)
        jobs.runner.submit_store(2, batches)
        jobs.runner.submit_lookup(3, batches)

        assert 1 == jobs.fetch(jobs.runner.finished_loads)[0].job_id
        assert 2 == jobs.fetch(jobs.runner.finished_stores)[0].job_id
        assert 3 == jobs.fetch(jobs.runner.finished_lookups)[0].job_id


@pytest.mark.parametrize("bad", ["not hexadecimal", None], ids=["text", "none"])
def test_a_malformed_hash_fails_its_job_only(bad: Any) -> None:
    wrong = Transfer(SPACE, [bad], [blank()])
    with engine() as jobs:
        jobs.save(batch([0]))

        assert [[Verdict.ERROR]] == jobs.load(wrong).verdicts == jobs.save(wrong).verdicts
        assert [[OK]] == jobs.load(target([0])).verdicts
        assert 0 == jobs.runner.stats()["private_nbytes_used"]


def test_an_error_of_the_engines_callback_changes_nothing() -> None:
    def fail(kind: JobKind) -> None:
        raise ValueError(kind)

    store = PageStore(MemoryStorage.from_config({}))
    runner = JobRunner(store, JobSettings(), on_finished=fail)
    runner.submit_store(1, [batch([0])])

    assert runner.drain(10)
    assert [[[OK]]] == [result.verdicts for result in runner.finished_stores()]
    assert runner.close()
    store.close()


# --- the engine's thread --------------------------------------------------------------------------


def test_each_result_is_announced_and_returned_once() -> None:
    with engine() as jobs:
        jobs.save(batch([0]))
        jobs.lookup((SPACE, [hash_of(0)]))
        jobs.load(target([0]))

        assert [JobKind.STORE, JobKind.LOOKUP, JobKind.LOAD] == jobs.notified
        assert [] == jobs.runner.finished_loads()
        assert [] == jobs.runner.finished_stores()
        assert [] == jobs.runner.finished_lookups()


def test_the_engines_thread_reads_no_page_of_a_job() -> None:
    counted = _Counted([hash_of(number) for number in range(64)])
    pages = [page() for _ in range(64)]
    with engine() as jobs:
        jobs.runner.submit_store(1, [Transfer(SPACE, counted, pages)])
        jobs.runner.submit_load(1, [Transfer(SPACE, counted, pages)])
        jobs.runner.submit_lookup(1, [(SPACE, counted)])
        assert jobs.runner.drain(10)

    assert counted.readers
    assert threading.current_thread().name not in counted.readers


def test_a_submission_runs_few_lines_of_python() -> None:
    lines = 0

    def count(frame: Any, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    stored = batch(range(64))
    with engine() as jobs:
        jobs.save(batch([0]))
        before = sys.gettrace()
        sys.settrace(count)
        try:
            jobs.runner.submit_store(1, [stored])
        finally:
            sys.settrace(before)
        assert jobs.runner.drain(10)

    assert lines < 100


# --- drain and close ------------------------------------------------------------------------------


def test_drain_waits_for_every_job() -> None:
    plan = [Odds("batch_set", Fault.DELAY, 1), Odds("batch_exists", Fault.DELAY, 1)]
    with engine(plan) as jobs:
        for number in range(5):
            jobs.runner.submit_store(number, [batch([number])])
            jobs.runner.submit_lookup(number, [(SPACE, [hash_of(number)])])

        assert jobs.runner.drain()
        assert 5 == len(jobs.runner.finished_stores()) == len(jobs.runner.finished_lookups())


def test_close_stores_what_waits() -> None:
    with engine([Odds("batch_set", Fault.DELAY, 1)]) as jobs:
        for number in range(5):
            jobs.runner.submit_store(number, [batch([number])])

        assert jobs.runner.close()
        assert [[[OK]]] * 5 == [result.verdicts for result in jobs.runner.finished_stores()]


def test_close_gives_up_the_jobs_that_run() -> None:
    with engine([Odds("batch_set", Fault.HANG, 1)], store_timeout_s=300) as jobs:
        for number in range(8):
            jobs.runner.submit_store(number, [batch([number])])
        wait_until(lambda: jobs.storage.calls["batch_set"] >= 1)  # type: ignore[attr-defined]

        assert jobs.runner.close(0)
        ended = [result.verdicts for result in jobs.runner.finished_stores()]
        assert [[[TIMEOUT]]] * 8 == ended


def test_jobs_after_close_end_at_once() -> None:
    with engine() as jobs:
        jobs.save(batch([0]))
        assert jobs.runner.close()

        assert [[False]] == jobs.lookup((SPACE, [hash_of(0)]))
        assert [[Verdict.UNAVAILABLE]] == jobs.load(target([0])).verdicts
        assert [[Verdict.UNAVAILABLE]] == jobs.save(batch([0])).verdicts


def test_close_twice_is_fine_and_ends_the_threads() -> None:
    before = set(threading.enumerate())
    with engine() as jobs:
        jobs.save(batch([0]))
        assert jobs.runner.close()
        assert jobs.runner.close()

    wait_until(lambda: not set(threading.enumerate()) - before)


# --- admission ------------------------------------------------------------------------------------

SECOND_USE = {"second_use": True, "remembered_pages": 1000}


def test_a_page_is_stored_when_it_is_submitted_again() -> None:
    found = target(range(4))
    with engine(admission=SECOND_USE) as jobs:
        assert [[NOT_ADMITTED] * 2] == jobs.save(batch([1, 3])).verdicts
        second = jobs.save(batch(range(4)), batch(range(2), OTHER))

        assert [[NOT_ADMITTED, OK] * 2, [NOT_ADMITTED] * 2] == second.verdicts
        assert 2 * 4096 == second.nbytes
        assert [[MISS, OK] * 2] == jobs.load(found).verdicts
        assert 6 == jobs.runner.stats()["not_admitted_first_use"]
        assert 6 == jobs.runner.stats()["store_pages_not_admitted"]
    assert contents(batch([1, 3])) == contents(found)[1::2]


def test_bytes_beyond_the_rate_are_not_stored() -> None:
    admission = {"write_nbytes_per_s": 1, "write_burst_nbytes": 3 * 4096}
    with engine(admission=admission) as jobs:
        assert [[OK] * 3 + [NOT_ADMITTED] * 2] == jobs.save(batch(range(5))).verdicts
        assert 2 == jobs.runner.stats()["not_admitted_rate"]


def test_a_runner_knows_the_pages_of_the_one_before() -> None:
    storage = MemoryStorage.from_config({})
    verdicts: list[list[list[Verdict]]] = []
    for _ in range(2):
        jobs = Engine(storage, owner=SPACE, admission=SECOND_USE)
        sketches = jobs.runner._admission._sketches
        assert sketches is not None
        wait_until(partial(getattr, sketches, "_restored"))
        verdicts.append(jobs.save(batch([0])).verdicts)
        assert jobs.runner.close()
        jobs.store.close()

    assert [[[NOT_ADMITTED]], [[OK]]] == verdicts


# --- key spaces and settings ----------------------------------------------------------------------


class _Late(WrapperStorage):
    """A storage that opens no key space until a test allows it."""

    is_up = False

    def open_space(self, space: KeySpace) -> None:
        if not self.is_up:
            raise StorageUnavailable("not yet")
        super().open_space(space)


def test_a_key_space_that_cannot_be_opened_is_a_miss_and_is_tried_again() -> None:
    storage = _Late(MemoryStorage.from_config({}))
    jobs = Engine(storage)

    assert [[False]] == jobs.lookup((SPACE, [hash_of(0)]))
    assert [[Verdict.MISS]] == jobs.load(target([0])).verdicts
    assert [[Verdict.UNAVAILABLE]] == jobs.save(batch([0])).verdicts
    assert 1 == jobs.runner.stats()["space_open_failures"]
    storage.is_up = True
    wait_until(lambda: jobs.save(batch([0])).verdicts == [[OK]])
    jobs.close()


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="queued_nbytes"):
        JobSettings.parse("jobs", {"queued_nbytes": 0})
