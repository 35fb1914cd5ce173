"""Records of the explain log that are made from results of a page store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from pages import hash_of

from hicache_storage.errors import ConfigError
from hicache_storage.page_store import Match, Verdict
from hicache_storage.request_log import (
    ExplainLog,
    ExplainLogSettings,
    Operation,
    Reason,
    RequestRecord,
    open_explain_log,
)
from hicache_storage.request_log.reading import LogReader, Selection

RecordOf: TypeAlias = "Callable[[Callable[[ExplainLog], None]], list[RequestRecord]]"

HASHES = [hash_of(number) for number in range(4)]
OK, MISS, TIMEOUT = Verdict.OK, Verdict.MISS, Verdict.TIMEOUT


@pytest.fixture
def record_of(tmp_path: Path) -> RecordOf:
    """Return a function that makes a call and returns the records which the call adds."""

    def run(add: Callable[[ExplainLog], None]) -> list[RequestRecord]:
        path = tmp_path / "log.jsonl"
        settings = ExplainLogSettings(explain_log=str(path))
        log = open_explain_log(settings, engine="test", rank=3)
        assert log is not None
        add(log)
        log.close()
        assert log.dropped_records == 0
        return list(LogReader(path).records(Selection()))

    return run


def test_the_first_gap_of_a_match_is_named_with_its_pool(record_of: RecordOf) -> None:
    present = [[True, True, True, False], [True, False, False, False]]
    match = Match(1, [True, True, False, False, False], present, [None, None])

    (record,) = record_of(lambda log: log.add_match(HASHES, match, ["kv", "draft"], elapsed_s=0.5))

    assert (record.engine, record.rank, record.operation) == ("test", 3, Operation.LOOKUP)
    assert (record.asked_pages, record.hit_pages, record.first_hash) == (4, 1, HASHES[0])
    assert (record.page, record.page_hash, record.pool) == (1, HASHES[1], "draft")
    assert record.reason is Reason.ABSENT
    assert record.elapsed_s == 0.5


def test_a_match_without_an_answer_has_the_reason_of_its_failure(record_of: RecordOf) -> None:
    match = Match(0, [True, False], [[False]], [Verdict.BREAKER_OPEN])

    (record,) = record_of(lambda log: log.add_match(HASHES[:1], match, ["kv"], elapsed_s=0.5))

    assert record.reason is Reason.BREAKER_OPEN


def test_a_prefix_that_a_window_cuts_names_no_pool(record_of: RecordOf) -> None:
    match = Match(0, [True, False, False], [[True, True], [True, False]], [None, None])

    (record,) = record_of(
        lambda log: log.add_match(HASHES[:2], match, ["kv", "window"], elapsed_s=0.5)
    )

    assert (record.page, record.pool, record.reason) == (0, None, Reason.ABSENT)


def test_a_whole_match_has_no_reason(record_of: RecordOf) -> None:
    match = Match(2, [True, True, True], [[True, True]], [None])

    (record,) = record_of(lambda log: log.add_match(HASHES[:2], match, ["kv"], elapsed_s=0.5))

    assert (record.hit_pages, record.page, record.reason) == (2, None, None)


def test_a_page_is_loaded_only_where_all_its_parts_are(record_of: RecordOf) -> None:
    verdicts = [[OK, OK, MISS, OK], [OK, TIMEOUT, OK, TIMEOUT]]

    (record,) = record_of(lambda log: log.add_pages(Operation.LOAD, HASHES, verdicts, "kv"))

    assert (record.asked_pages, record.hit_pages, record.page) == (4, 1, 1)
    assert record.reason is Reason.TIMEOUT
    assert record.reasons == {Reason.TIMEOUT: 2, Reason.VANISHED: 1}


def test_only_a_store_that_left_pages_out_is_recorded(record_of: RecordOf) -> None:
    kept = [[Verdict.NOT_ADMITTED, OK]]

    def add(log: ExplainLog) -> None:
        log.add_pages(Operation.STORE, HASHES[:2], [[OK, OK]], "kv")
        log.add_pages(Operation.STORE, HASHES[:2], kept, "kv", request="r")

    (record,) = record_of(add)

    assert (record.request, record.reason) == ("r", Reason.NOT_ADMITTED)


def test_hashes_that_the_caller_changes_later_are_recorded_as_they_were(
    record_of: RecordOf,
) -> None:
    hashes = list(HASHES)

    def add(log: ExplainLog) -> None:
        log.add_pages(Operation.LOAD, hashes, [[MISS] * 4], "kv")
        hashes.clear()

    (record,) = record_of(add)

    assert record.page_hash == HASHES[0]


def test_without_a_file_there_is_no_log() -> None:
    assert open_explain_log(ExplainLogSettings(), engine="test") is None


def test_a_file_that_cannot_be_written_is_an_error_of_the_config(tmp_path: Path) -> None:
    settings = ExplainLogSettings(explain_log=str(tmp_path / "missing" / "log.jsonl"))

    with pytest.raises(ConfigError, match=r"test: explain_log: .*cannot be written: No such file"):
        open_explain_log(settings, engine="test")


def test_the_process_id_has_a_place_in_the_name(tmp_path: Path) -> None:
    settings = ExplainLogSettings(explain_log=str(tmp_path / "log-{pid}.jsonl"))

    log = open_explain_log(settings, engine="test")
    assert log is not None
    log.close()

    assert [path.name for path in tmp_path.iterdir()] == [f"log-{os.getpid()}.jsonl"]
