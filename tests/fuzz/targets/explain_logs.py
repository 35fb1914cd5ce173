"""Explain logs: each line is a record or counts as unreadable, and every record can be shown."""

from __future__ import annotations

import json
from itertools import chain

from fuzz.choices import Choices
from fuzz.scratch import directory, write
from pages import hash_of

from hicache_storage.errors import ConfigError
from hicache_storage.request_log import Operation, Reason, RequestRecord
from hicache_storage.request_log.reading import LogReader, Selection, summary_of
from hicache_storage.request_log.records import dropped_line

_RECORD = RequestRecord(
    at_s=1.5,
    engine="vllm",
    rank=0,
    operation=Operation.LOOKUP,
    request="r1",
    first_hash=hash_of(1),
    asked_pages=3,
    hit_pages=1,
    l2_pages=1,
    page=1,
    page_hash=hash_of(2),
    pool="kv",
    reason=next(iter(Reason)),
    reasons={next(iter(Reason)): 2},
    elapsed_s=0.25,
)
_LINE = _RECORD.line().encode()
_SELECTIONS = (
    Selection(),
    Selection(page_hash=hash_of(2)[:8]),
    Selection(request="r1"),
    Selection(request=hash_of(1)[:8], since_s=1.0),
)
_WRONG = (b"null", b"1", b"-1", b'"x"', b"[]", b"{}", b"1e999", b"NaN", b"true", b"9" * 30)

SEEDS = (
    b"",
    *(bytes([n]) + _LINE + dropped_line(3, 2.0, "vllm", 0).encode() + _LINE for n in range(4)),
    b"\0{}\n[]\n1\n\xff\n" + b"[" * 2000,
    *(
        bytes([1]) + json.dumps({**_RECORD.as_json(), name: "x"}).encode()
        for name in _RECORD.as_json()
    ),
)
TOKENS = (
    *(f'"{name}":'.encode() for name in _RECORD.as_json()),
    *_WRONG,
    b'"dropped_records":',
    b"\n",
)


def check(data: bytes) -> None:
    choices = Choices(data)
    selection = choices.pick(_SELECTIONS)
    content = choices.rest()
    path = directory("explain-logs") / "log.jsonl"
    write(str(path), content)
    reader = LogReader(path)
    try:
        records = list(reader.records(selection))
    except ConfigError as error:
        assert "is not an explain log" in str(error)
        assert reader.unreadable_lines > reader.dropped_records == 0
        return
    assert reader.dropped_records >= 0
    for record in records:
        again = RequestRecord.model_validate(json.loads(record.line()))
        assert record.line() == again.line()
        assert record in selection
    summary = summary_of(LogReader(path), selection)
    assert summary.records == len(records)
    assert summary.unreadable_lines == reader.unreadable_lines
    assert all(count.records > 0 for count in summary.reasons.values())
    hashes = chain.from_iterable((record.first_hash, record.page_hash) for record in records)
    assert all(page_hash is None or isinstance(page_hash, str) for page_hash in hashes)
