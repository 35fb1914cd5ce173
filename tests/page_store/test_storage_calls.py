"""Storage calls: their digests, and what the breaker counts if a call outlasts its caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from framed import HASHES, TARGET, bytes_of, empty, filled, transfer
from hicache_backends.file import FileStorage
from servers import wait_until
from stores import Gate, HookedStorage, failing

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.executor import DaemonExecutor
from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings
from hicache_storage.page_store.begun import finish
from hicache_storage.page_store.frame import FRAME_NBYTES
from hicache_storage.page_store.lookup import PoolSpec
from hicache_storage.page_store.results import Verdict
from hicache_storage.page_store.spaces import OpenSpaces
from hicache_storage.page_store.storage_calls import Lanes, NotTriedError
from hicache_storage.storage import HiCacheStorage
from hicache_storage.testing import Fault, FaultyStorage, Strike, WrapperStorage

POOLS = [PoolSpec(space=TARGET)]
BEGUN_S = 0.5
"""A time within which a thread has begun the call, on a busy machine, too."""


@pytest.mark.parametrize("parallelism", [1, 2, 8])
def test_a_hung_store_opens_the_breaker_however_short_the_timeouts(
    storage: HookedStorage, open_store: Callable[..., PageStore], parallelism: int
) -> None:
    """The breaker opens even if all threads are in hanging calls, so that no other call can begin."""
    store = open_store(timeout_s=1, parallelism=parallelism, breaker_cooldown_s=1000)
    gate = Gate()
    storage.hooks["batch_exists"] = gate

    wait_until(
        lambda: (
            store.match(HASHES, POOLS, timeout_s=0.01).failures[0] is Verdict.BREAKER_OPEN
            and store.breaker.reads.state == "open"
        )
    )

    assert storage.calls["batch_exists"] <= parallelism + 3
    gate.open()


@pytest.mark.parametrize("late_s", [0.0, 0.05], ids=["no time", "too late"])
@pytest.mark.parametrize("call", [PageStore.present, PageStore.delete])
def test_a_store_is_not_called_after_the_deadline(
    storage: HookedStorage,
    open_store: Callable[..., PageStore],
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[..., object],
    late_s: float,
) -> None:
    """A store that hangs would occupy the thread, which calls that still have time need."""

    def begun_late(_: DaemonExecutor, task: Callable[[], Any], **__: object) -> Future[Any]:
        future = Future[Any]()
        time.sleep(late_s)
        try:
            future.set_result(task())
        except NotTriedError as error:
            future.set_exception(error)
        return future

    store = open_store()
    storage.calls.clear()
    monkeypatch.setattr(DaemonExecutor, "submit", begun_late)

    assert call(store, TARGET, HASHES[:1], timeout_s=late_s) in ([None], 0)
    assert not storage.calls


def test_a_slow_call_counts_when_it_ends_though_its_caller_is_gone(
    storage: HookedStorage, open_store: Callable[..., PageStore]
) -> None:
    store = open_store(timeout_s=2 * BEGUN_S, breaker_failures=1, breaker_cooldown_s=1000)

    def slow(answer: Callable[[], Any]) -> Any:
        time.sleep(2.2 * BEGUN_S)
        return answer()

    storage.hooks["batch_get"] = slow
    outcome = store.load([transfer(empty(1))], timeout_s=BEGUN_S)

    assert [[Verdict.TIMEOUT]] == outcome.verdicts
    wait_until(lambda: store.breaker.reads.state == "open")


def test_a_write_has_a_time_limit_of_its_own(
    storage: HookedStorage, open_store: Callable[..., PageStore]
) -> None:
    store = open_store(timeout_s=0.5, write_timeout_s=30, breaker_failures=1)

    def slow(answer: Callable[[], Any]) -> Any:
        time.sleep(0.6)
        return answer()

    storage.hooks["batch_set"] = slow

    assert [[Verdict.OK]] == store.save([transfer(filled(1))]).verdicts
    assert store.breaker.writes.state == "closed"


def test_a_call_that_ends_in_time_is_a_success_though_its_caller_is_gone(
    storage: HookedStorage, open_store: Callable[..., PageStore]
) -> None:
    store = open_store(timeout_s=50, breaker_failures=2)
    store.breaker.record(succeeded=False)
    gate = Gate()
    storage.hooks["batch_get"] = gate
    store.load([transfer(empty(1))], timeout_s=BEGUN_S)
    gate.open()
    store.close()  # it joins the thread of the call, which has reported its success then

    store.breaker.record(succeeded=False)

    assert store.breaker.reads.state == "closed"


def test_a_call_that_fails_is_a_failure_though_its_caller_is_gone(
    storage: HookedStorage, open_store: Callable[..., PageStore]
) -> None:
    store = open_store(timeout_s=50, breaker_failures=1, breaker_cooldown_s=1000)
    gate = Gate()
    storage.hooks["batch_get"] = lambda answer: gate(failing_later(answer))
    store.load([transfer(empty(1))], timeout_s=BEGUN_S)
    assert store.breaker.reads.state == "closed"

    gate.open()

    wait_until(lambda: store.breaker.reads.state == "open")


def failing_later(_: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: failing(StorageUnavailable("down"))(lambda: None)


def test_a_probe_with_a_short_timeout_lasts_until_the_store_has_answered(
    storage: HookedStorage, open_store: Callable[..., PageStore]
) -> None:
    store = open_store(timeout_s=50, breaker_failures=1, breaker_cooldown_s=0.001)
    store.breaker.record(succeeded=False)
    gate = Gate()
    storage.hooks["batch_exists"] = gate
    wait_until(lambda: store.match(HASHES, POOLS, timeout_s=BEGUN_S).failures == [Verdict.TIMEOUT])

    others = [store.match(HASHES, POOLS, timeout_s=BEGUN_S).failures for _ in range(5)]

    assert [[Verdict.BREAKER_OPEN]] * 5 == others
    assert storage.calls["batch_exists"] == 1
    gate.open()
    wait_until(lambda: store.breaker.reads.state == "closed")


def test_a_call_that_began_too_late_to_be_made_closes_no_breaker(
    open_store: Callable[..., PageStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread finds that the deadline has passed and makes no call, which is not a success."""
    store = open_store(timeout_s=50, breaker_failures=1, breaker_cooldown_s=0.001)
    store.breaker.record(succeeded=False)
    wait_until(lambda: store.breaker.writes.state == "half_open")

    def passed(_: Deadline) -> bool:
        return True

    with monkeypatch.context() as patched:
        patched.setattr(Deadline, "passed", passed)
        assert [[Verdict.TIMEOUT]] == store.save([transfer(filled(1))], timeout_s=1).verdicts

    assert store.breaker.writes.state == "half_open"
    assert [[Verdict.OK]] == store.save([transfer(filled(1))]).verdicts


def test_the_cause_of_a_foreign_error_is_not_logged(
    storage: HookedStorage, open_store: Callable[..., PageStore], caplog: pytest.LogCaptureFixture
) -> None:
    """The error message of a client library may contain credentials."""

    error = RuntimeError("the client gave up")
    error.__cause__ = OSError("no route to redis://:swordfish1@host")
    storage.hooks["batch_get"] = failing(error)

    assert [[Verdict.ERROR]] == open_store().load([transfer(empty(1))]).verdicts
    assert "RuntimeError: the client gave up" in caplog.text
    assert "in hook" in caplog.text
    assert "swordfish1" not in caplog.text


def test_callers_that_wait_behind_others_do_not_open_it(
    storage: HookedStorage, open_store: Callable[..., PageStore]
) -> None:
    """A call that only waited in the queue and never reached the store is not a failure of the store."""
    store = open_store(timeout_s=50, parallelism=1, breaker_failures=1)
    gate = Gate()
    storage.hooks["batch_set"] = gate
    writer = threading.Thread(target=lambda: store.save([transfer(filled(1))]))
    writer.start()
    assert gate.entered.wait(20)

    for _ in range(5):
        assert [[Verdict.TIMEOUT]] == store.save([transfer(filled(1))], timeout_s=0.01).verdicts

    assert store.breaker.writes.state == "closed"
    gate.open()
    writer.join(20)


def test_a_lookup_that_hangs_opens_the_breaker_of_reads_at_once(
    storage: HookedStorage, open_store: Callable[..., PageStore]
) -> None:
    store = open_store(timeout_s=50, lookup_timeout_s=BEGUN_S, breaker_cooldown_s=1000)
    gate = Gate()
    storage.hooks["batch_exists"] = gate

    first, second = (store.match(HASHES, POOLS).failures[0] for _ in range(2))

    assert (first, second) == (Verdict.TIMEOUT, Verdict.BREAKER_OPEN)
    assert (store.breaker.reads.state, store.breaker.writes.state) == ("open", "closed")
    gate.open()


@pytest.mark.parametrize(
    ("error", "state"), [(StorageTimeout("late"), "open"), (StorageUnavailable("down"), "closed")]
)
def test_of_the_stores_own_errors_only_a_timeout_is_a_hang(
    storage: HookedStorage, open_store: Callable[..., PageStore], error: Exception, state: str
) -> None:
    store = open_store(timeout_s=50, lookup_timeout_s=50, breaker_cooldown_s=1000)
    storage.hooks["batch_exists"] = failing(error)

    store.match(HASHES, POOLS)

    assert store.breaker.reads.state == state


def test_a_lookup_behind_others_is_no_hang(
    storage: HookedStorage, open_store: Callable[..., PageStore]
) -> None:
    store = open_store(timeout_s=50, lookup_timeout_s=0.05, parallelism=1)
    gate = Gate()
    storage.hooks["batch_get"] = gate
    reader = threading.Thread(target=lambda: store.load([transfer(empty(1))]))
    reader.start()
    assert gate.entered.wait(20)

    assert store.match(HASHES, POOLS).failures == [Verdict.TIMEOUT]

    assert store.breaker.reads.state == "closed"
    gate.open()
    reader.join(20)


def test_a_probe_of_a_store_that_hangs_costs_a_lookup_a_moment(
    storage: HookedStorage, open_store: Callable[..., PageStore]
) -> None:
    """The probe itself continues, and its answer closes the breaker."""
    store = open_store(timeout_s=1000, lookup_timeout_s=500, breaker_cooldown_s=0.001)
    gate = Gate()
    storage.hooks["batch_exists"] = gate
    for _ in range(3):
        store.breaker.reads.record(succeeded=False)
    wait_until(lambda: store.breaker.reads.state == "half_open")

    began_s = time.monotonic()
    assert store.match(HASHES, POOLS).failures == [Verdict.TIMEOUT]
    assert time.monotonic() - began_s < 60

    assert store.match(HASHES, POOLS).failures == [Verdict.BREAKER_OPEN]
    gate.open()
    wait_until(lambda: store.breaker.reads.state == "closed")


# --- digests of the storage -------------------------------------------------------------------------

FRAMED = replace(TARGET, frame_nbytes=FRAME_NBYTES)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FileStorage]:
    with FileStorage.from_config({"path": str(tmp_path)}) as storage:
        storage.open_space(FRAMED)
        yield storage


def move(storage: HiCacheStorage, direction: str, pages: list[Page]) -> list[Verdict]:
    """Move the first pages with a lane alone, because a page store would delete wrong pages."""
    lanes = Lanes(OpenSpaces(storage), PageStoreSettings())
    lane = lanes.reads if direction == "load" else lanes.writes
    (verdicts,) = finish(lane.move([(FRAMED, transfer(pages))], Deadline(20))).verdicts
    lanes.close(20)
    return verdicts


def load(storage: HiCacheStorage) -> tuple[list[Verdict], bytes]:
    """Return the verdict on one page, and its bytes."""
    pages = empty(1)
    verdicts = move(storage, "load", pages)
    return verdicts, pages[0].tobytes()


def test_a_page_passes_by_the_digest_of_its_storage(files: FileStorage) -> None:
    move(files, "save", filled(1))

    assert ([Verdict.OK], bytes_of(1)) == load(files)


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.TEAR])
def test_a_page_that_changed_after_its_digest_is_no_hit(files: FileStorage, fault: Fault) -> None:
    move(files, "save", filled(1))
    faulty = FaultyStorage(files, [Strike("batch_get", 0, fault)])

    verdicts, _ = load(faulty)

    assert [Verdict.OK] != verdicts
    assert ([Verdict.OK], bytes_of(1)) == load(files)


class Revoking(WrapperStorage):
    """A revocable storage that revokes pages right after it has read them."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        verdicts = super().batch_get(space, hashes, pages)
        for page in pages:
            if page.revocable is not None:
                page.revocable.revoke()
        return verdicts


def test_a_page_that_was_revoked_before_its_checksum_is_not_ok(files: FileStorage) -> None:
    move(files, "save", filled(3))

    verdicts = move(Revoking(files), "load", empty(3))

    assert [Verdict.TIMEOUT] * 3 == verdicts
    assert [True] * 3 == files.batch_exists(FRAMED, HASHES[:3])
