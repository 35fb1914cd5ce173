"""Records of a log file are selected and counted, and so are damaged lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pages import hash_of

from hicache_storage.errors import ConfigError
from hicache_storage.request_log import Operation, Reason, RequestRecord
from hicache_storage.request_log.log_file import older_file
from hicache_storage.request_log.reading import LogReader, Selection, summary_of
from hicache_storage.request_log.records import dropped_line


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def record(at_s: float, **fields: Any) -> RequestRecord:
    fields = {"operation": Operation.LOOKUP, "asked_pages": 8, "hit_pages": 8, **fields}
    return RequestRecord(at_s=at_s, engine="test", rank=0, **fields)


def write(path: Path, *records: RequestRecord) -> None:
    path.write_text("".join(each.line() for each in records))


def read(path: Path, **selection: Any) -> list[float]:
    """Return the times of the selected records."""
    return [each.at_s for each in LogReader(path).records(Selection(**selection))]


def test_a_line_whose_numbers_are_none_is_counted_as_damaged(path: Path) -> None:
    path.write_text('{"dropped_records": Infinity}\n{"dropped_records": -3}\n' + record(1).line())
    reader = LogReader(path)

    assert [1] == [each.at_s for each in reader.records(Selection())]
    assert (0, 2) == (reader.dropped_records, reader.unreadable_lines)


def test_the_older_file_is_read_first(path: Path) -> None:
    write(path, record(3))
    write(older_file(path), record(1), record(2))

    assert read(path) == [1, 2, 3]


def test_a_request_is_found_by_its_whole_id(path: Path) -> None:
    write(path, record(1, request="chat-1"), record(2, request="chat-12"), record(3))

    assert read(path, request="chat-1") == [1]


def test_a_request_without_an_id_is_found_by_its_first_page(path: Path) -> None:
    page_hash = hash_of(5)
    write(path, record(1, first_hash=page_hash), record(2, first_hash=hash_of(6)))

    assert read(path, request=page_hash[:8]) == [1]
    assert read(path, request=page_hash[:3]) == []


def test_a_page_is_found_where_it_is_the_first_one_or_the_missing_one(path: Path) -> None:
    page_hash = hash_of(5)
    write(
        path,
        record(1, first_hash=page_hash),
        record(2, first_hash=hash_of(6), page_hash=page_hash, reason=Reason.ABSENT),
        record(3, first_hash=hash_of(6)),
    )

    assert read(path, page_hash=page_hash[:10]) == [1, 2]


def test_records_since_a_time(path: Path) -> None:
    write(path, record(1), record(2), record(3))

    assert read(path, since_s=2) == [2, 3]


def test_records_are_counted_by_operation_and_reason(path: Path) -> None:
    absent = {"reason": Reason.ABSENT, "hit_pages": 6}
    write(
        path,
        record(1),
        record(2, **absent),
        record(3, **absent),
        record(4, operation=Operation.STORE, reason=Reason.REFUSED, hit_pages=0),
    )

    summary = summary_of(LogReader(path), Selection())

    assert (summary.records, summary.whole_records) == (4, 1)
    assert (summary.asked_pages, summary.hit_pages) == (24, 20)
    assert (summary.first_s, summary.last_s) == (1, 4)
    counted = {key: (one.records, one.missing_pages) for key, one in summary.reasons.items()}
    assert counted == {
        (Operation.LOOKUP, Reason.ABSENT): (2, 4),
        (Operation.STORE, Reason.REFUSED): (1, 8),
    }


def test_dropped_records_and_damaged_lines_are_counted(path: Path) -> None:
    whole = record(1).line()
    path.write_bytes(
        whole.encode() + dropped_line(7, 1.0, "test", 0).encode() + b'{"at_s": 1\n\xff\xfe\n[]\n'
    )

    summary = summary_of(LogReader(path), Selection())

    assert (summary.records, summary.dropped_records, summary.unreadable_lines) == (1, 7, 3)


def test_a_missing_file_is_an_error(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log\.jsonl: cannot be read: No such file"):
        list(LogReader(path).records(Selection()))
