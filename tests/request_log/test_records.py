"""A record becomes a line of JSON, and the line gives the same record back."""

from __future__ import annotations

import json

import pytest

from hicache_storage.request_log import Operation, Reason, RequestRecord
from hicache_storage.request_log.records import MAX_ID_CHARACTERS

WHOLE = RequestRecord(
    at_s=1.5,
    engine="vllm",
    rank=1,
    operation=Operation.PREFETCH,
    request="chat-7",
    first_hash="ab" * 32,
    asked_pages=9,
    hit_pages=4,
    l2_pages=1,
    page=4,
    page_hash="cd" * 32,
    pool="kv",
    other_rank=2,
    reason=Reason.TIMEOUT,
    reasons={Reason.TIMEOUT: 3, Reason.ABSENT: 2},
    elapsed_s=0.25,
)
LEAST = RequestRecord(
    at_s=2.0, engine="sglang", rank=0, operation=Operation.LOOKUP, asked_pages=0, hit_pages=0
)


@pytest.mark.parametrize("record", [WHOLE, LEAST])
def test_a_record_comes_back_from_its_line(record: RequestRecord) -> None:
    line = record.line()

    assert line.endswith("}\n")
    assert RequestRecord.model_validate(json.loads(line)) == record


def test_fields_without_a_value_are_left_out() -> None:
    assert LEAST.as_json() == {
        "at_s": 2.0,
        "engine": "sglang",
        "rank": 0,
        "operation": "lookup",
        "asked_pages": 0,
        "hit_pages": 0,
        "unused_pages": 0,
    }


def test_fields_of_a_later_release_are_left_out() -> None:
    assert RequestRecord.model_validate({**LEAST.as_json(), "weather": "fine"}) == LEAST


@pytest.mark.parametrize(
    "change",
    [
        *({"operation": "dance"}, {"reason": "weather"}, {"asked_pages": None}, {"reasons": 7}),
        *({"hit_pages": float("inf")}, {"asked_pages": -1}, {"l2_pages": "1"}, {"page": 0.5}),
        *({"at_s": 1e300}, {"at_s": -1}, {"at_s": None}, {"elapsed_s": float("nan")}),
        *(
            {"page_hash": 7},
            {"first_hash": ["ab"]},
            {"engine": None},
            {"reasons": {"timeout": "3"}},
        ),
    ],
)
def test_a_line_of_something_else_is_refused(change: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        RequestRecord.model_validate({**WHOLE.as_json(), **change})


def test_a_long_request_id_is_cut() -> None:
    record = RequestRecord(
        at_s=0, engine="vllm", rank=0, operation=Operation.LOAD, asked_pages=1, hit_pages=1,
        request="x" * 5000,
    )  # fmt: skip

    assert record.as_json()["request"] == "x" * MAX_ID_CHARACTERS
