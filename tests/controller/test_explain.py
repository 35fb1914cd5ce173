"""Explanations of why a request got the number of pages that it got."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPT, cache_pools, compute, engine_on
from pages import hash_of
from stores import HookedStorage, failing

from hicache_storage.controller import Reason
from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.page_store.admission import Admission, AdmissionSettings
from hicache_storage.request_log import (
    ExplainLog,
    ExplainLogSettings,
    Operation,
    RequestRecord,
    open_explain_log,
)
from hicache_storage.request_log.reading import LogReader, Selection


@pytest.fixture
def storage() -> HookedStorage:
    storage = HookedStorage()
    with engine_on(storage, cache_pools()) as first:
        compute(first, PROMPT)
        assert first.drain(20)
    return storage


def explained(storage: HookedStorage, **settings: Any) -> str:
    """Return the explanation of a new engine's request for the prompt."""
    with engine_on(storage, cache_pools(), **settings) as engine:
        engine.prefetch("r", PROMPT).result().release()
        return str(engine.explain("r"))


def test_a_whole_prefix_needs_no_reason(storage: HookedStorage) -> None:
    assert explained(storage) == (
        "request 'r': 16 of 16 pages are usable (0 from host memory, 16 from storage)"
    )


def test_a_page_that_storage_lacks_is_named_with_its_pool(storage: HookedStorage) -> None:
    (draft,) = (space for space in storage.inner.spaces() if space.pool == "draft")
    storage.inner.batch_delete(draft, PROMPT[6:7])

    assert explained(storage) == (
        "request 'r': 6 of 16 pages are usable (0 from host memory, 6 from storage);"
        " page 6 of pool 'draft' was not in storage"
    )


def test_a_corrupt_page_is_distinguished_from_an_absent_one(storage: HookedStorage) -> None:
    (target,) = (space for space in storage.inner.spaces() if space.pool == "kv")
    pages = storage.inner._spaces[target]
    pages[PROMPT[5]][-1:] = b"?"

    assert "page 5 of pool 'kv' was corrupt in storage" in explained(storage)


@pytest.mark.parametrize("operation", ["batch_exists", "batch_get"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StorageUnavailable("down"), Reason.UNAVAILABLE),
        (StorageTimeout("slow"), Reason.TIMEOUT),
        (RuntimeError("bug"), Reason.STORE_ERROR),
    ],
)
def test_a_store_that_does_not_answer_is_explained(
    storage: HookedStorage, operation: str, error: Exception, reason: Reason
) -> None:
    storage.hooks[operation] = failing(error)

    assert f"page 0 of pool 'kv' {reason.value}" in explained(storage)


def test_a_page_that_vanished_since_the_lookup_is_explained(storage: HookedStorage) -> None:
    (target,) = (space for space in storage.inner.spaces() if space.pool == "kv")

    def vanish(answer: Callable[[], Any]) -> Any:
        storage.inner.batch_delete(target, PROMPT[9:10])
        return answer()

    storage.hooks["batch_get"] = vanish

    assert "page 9 of pool 'kv' was gone when it was read" in explained(storage)


def test_few_tokens_are_explained(storage: HookedStorage) -> None:
    assert "prefetch threshold" in explained(storage, prefetch_threshold_tokens=10_000)


def test_full_host_memory_is_explained(storage: HookedStorage) -> None:
    with engine_on(storage, cache_pools(10)) as engine:
        engine.prefetch("r", PROMPT).result().release()
        explained = engine.explain("r")

    assert (10, Reason.NO_HOST_SLOT) == (explained.first_missing, explained.reason)


def test_an_open_breaker_is_explained(storage: HookedStorage) -> None:
    with engine_on(storage, cache_pools()) as engine:
        attached = engine._attached
        assert attached is not None
        for _ in range(1000):
            attached.store.breaker.record(succeeded=False)
        engine.prefetch("r", PROMPT).result().release()
        assert engine.explain("r").reason is Reason.BREAKER_OPEN


def test_a_cancelled_request_is_explained(storage: HookedStorage) -> None:
    with engine_on(storage, cache_pools()) as engine:
        engine.prefetch("r", PROMPT).cancel()
        assert engine.explain("r").reason is Reason.CANCELLED


def test_the_last_requests_are_remembered_and_no_more() -> None:
    with engine_on(None, cache_pools(), explained_requests=2) as engine:
        for number in range(3):
            engine.prefetch(f"{number}", [hash_of(number)]).result().release()

        assert engine.explain("2").asked_pages == 1
        assert engine.explain("1").asked_pages == 1
        with pytest.raises(LookupError, match="'0' is not among the last 2"):
            engine.explain("0")


def test_every_reason_completes_the_sentence_about_a_page() -> None:
    for reason in Reason:
        assert reason.value.split()[0] in {"was", "did", "could", "had", "is", "cannot"}


# The explain log of a controller: a record for each request, and for each write that left pages out.


@pytest.fixture
def log(tmp_path: Path) -> Generator[ExplainLog]:
    opened = open_explain_log(
        ExplainLogSettings(explain_log=str(tmp_path / "log.jsonl")), engine="test"
    )
    assert opened is not None
    yield opened
    opened.close()


@pytest.fixture
def records(log: ExplainLog, tmp_path: Path) -> Callable[[], list[RequestRecord]]:
    def read() -> list[RequestRecord]:
        log.close()
        return list(LogReader(tmp_path / "log.jsonl").records(Selection()))

    return read


def test_a_record_says_what_explain_says(
    storage: HookedStorage, log: ExplainLog, records: Callable[[], list[RequestRecord]]
) -> None:
    (draft,) = (space for space in storage.inner.spaces() if space.pool == "draft")
    storage.inner.batch_delete(draft, PROMPT[6:7])
    with engine_on(storage, cache_pools(), explain_log=log) as engine:
        engine.prefetch("r", PROMPT).result().release()
        explained = engine.explain("r")

    (record,) = records()

    assert (record.request, record.operation) == ("r", Operation.PREFETCH)
    assert (record.asked_pages, record.hit_pages, record.l2_pages) == (16, 6, 0)
    assert (record.page, record.page_hash, record.pool) == (6, PROMPT[6], "draft")
    assert record.first_hash == PROMPT[0]
    assert record.reason is explained.reason is Reason.ABSENT
    assert record.elapsed_s is not None


def test_a_whole_prefix_and_a_cancelled_one_have_records(
    storage: HookedStorage, log: ExplainLog, records: Callable[[], list[RequestRecord]]
) -> None:
    with engine_on(storage, cache_pools(), explain_log=log) as engine:
        engine.prefetch("whole", PROMPT).result().release()
        engine.prefetch("none", []).result().release()
        engine.prefetch("cancelled", PROMPT).cancel()

    assert [(record.request, record.reason, record.page_hash) for record in records()] == [
        ("whole", None, None),
        ("none", None, None),
        ("cancelled", Reason.CANCELLED, PROMPT[0]),
    ]


@pytest.mark.parametrize("reason", [Reason.WRONG_KEY, Reason.CORRUPT], ids=["key", "frame"])
def test_a_wrong_page_is_told_by_the_check_that_it_failed(
    storage: HookedStorage,
    log: ExplainLog,
    records: Callable[[], list[RequestRecord]],
    reason: Reason,
) -> None:
    (target,) = (space for space in storage.inner.spaces() if space.pool == "kv")
    pages = storage.inner._spaces[target]
    if reason is Reason.WRONG_KEY:  # a whole page of another hash
        pages[PROMPT[5]] = pages[PROMPT[4]]
    else:
        pages[PROMPT[5]] = memoryview(bytearray(len(pages[PROMPT[5]])))
    with engine_on(storage, cache_pools(), explain_log=log) as engine:
        engine.prefetch("r", PROMPT).result().release()

    (record,) = records()

    assert (record.page, record.pool, record.reason) == (5, "kv", reason)


def test_pages_that_are_not_admitted_have_a_record(
    log: ExplainLog, records: Callable[[], list[RequestRecord]]
) -> None:
    admission = Admission(AdmissionSettings(second_use=True, remembered_pages=1000))
    with engine_on(HookedStorage(), cache_pools(), admission=admission, explain_log=log) as engine:
        compute(engine, PROMPT)
        assert engine.drain(20)

    (record,) = records()

    assert (record.operation, record.reason) == (Operation.STORE, Reason.NOT_ADMITTED)
    assert (record.asked_pages, record.hit_pages, record.page_hash) == (16, 0, PROMPT[0])


def test_a_write_that_the_store_refuses_in_part_has_a_record(
    log: ExplainLog, records: Callable[[], list[RequestRecord]]
) -> None:
    storage = HookedStorage()

    def refuse_last(answer: Callable[[], Any]) -> Any:
        return [*answer()[:-1], False]

    storage.hooks["batch_set"] = refuse_last
    with engine_on(storage, cache_pools(), explain_log=log, batch_pages=16) as engine:
        compute(engine, PROMPT)
        engine.drain(20)

    (record, *_) = records()

    assert (record.operation, record.reason) == (Operation.STORE, Reason.REFUSED)
    assert record.asked_pages > record.hit_pages > 0
    assert record.page_hash in PROMPT
    assert record.reasons == {Reason.REFUSED: record.asked_pages - record.hit_pages}


def test_pages_beyond_the_limit_of_the_write_queue_have_a_record(
    log: ExplainLog, records: Callable[[], list[RequestRecord]]
) -> None:
    with engine_on(HookedStorage(), cache_pools(), explain_log=log, write_queue_pages=10) as engine:
        compute(engine, PROMPT)
        engine.drain(20)

    (record,) = records()

    assert (record.operation, record.reason) == (Operation.STORE, Reason.REFUSED)
    assert (record.asked_pages, record.hit_pages) == (6, 0)
