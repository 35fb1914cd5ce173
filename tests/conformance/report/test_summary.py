"""The short form of a record."""

from __future__ import annotations

from pathlib import Path

import pytest
import records
from hicache_conformance.report.record import RecordError
from hicache_conformance.report.summary import Summary
from hicache_conformance.run.outcomes import Outcome

CHECKS = [
    records.check_record("KV-002", Outcome.PASSED),
    records.check_record("KV-003", Outcome.PASSED, "a"),
    records.check_record("KV-003", Outcome.FAILED, "b"),
    records.check_record("KV-003", Outcome.NOT_VERIFIED, "c"),
]


def test_a_summary_counts_checks_and_names_the_failed_ones() -> None:
    summary = Summary.of(records.record(*CHECKS))

    assert [
        {Outcome.PASSED: 1},
        {Outcome.PASSED: 1, Outcome.FAILED: 1, Outcome.NOT_VERIFIED: 1},
    ] == [rule.checks for rule in summary.rules]
    assert ("KV-003:b",) == summary.failed_checks


def test_a_record_and_its_summary_are_read_alike(tmp_path: Path) -> None:
    record = records.record(*CHECKS)
    summary = Summary.of(record)
    for name, text in (("record", record.to_json()), ("summary", summary.to_json())):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")

        assert summary == Summary.read(path)


def test_a_rule_takes_one_line() -> None:
    lines = Summary.of(records.record(*CHECKS)).to_json().splitlines()

    assert 1 == len([line for line in lines if '"id": "KV-003"' in line])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a record"),
        ("{", "cannot be read as JSON"),
        ('{"summary_version": 2}', "summary_version 2"),
        ('{"summary_version": 1}', "is not a summary of a run: see store"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(RecordError, match=message):
        Summary.read(path)
