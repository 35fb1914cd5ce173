"""The explain log of a controller: a record for each request, and for each write that left pages out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from engines import PROMPT, cache_pools, compute, engine_on
from stores import HookedStorage

from hicache_storage.controller import Reason
from hicache_storage.page_store.admission import Admission, AdmissionSettings
from hicache_storage.request_log import (
    ExplainLog,
    ExplainLogSettings,
    Operation,
    RequestRecord,
    open_explain_log,
)
from hicache_storage.request_log.reading import LogReader, Selection

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path


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


@pytest.fixture
def storage() -> HookedStorage:
    storage = HookedStorage()
    with engine_on(storage, cache_pools()) as first:
        compute(first, PROMPT)
        assert first.drain(20)
    return storage


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
        pages[PROMPT[5]] = bytearray(len(pages[PROMPT[5]]))
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
