"""What a new run changed beside the record of an old one."""

from __future__ import annotations

from pathlib import Path

import records
from field.changes import changes, main
from hicache_conformance.report.record import Record
from hicache_conformance.report.summary import Summary
from hicache_conformance.run.outcomes import Outcome


def run(first: Outcome, second: Outcome) -> Record:
    checks = (("KV-002", first), ("KV-003", second))
    return records.record(*(records.check_record(rule, outcome) for rule, outcome in checks))


def test_a_check_that_fails_now_and_one_that_fails_no_more_are_named() -> None:
    before, after = (
        Summary.of(run(*outcomes))
        for outcomes in [(Outcome.FAILED, Outcome.PASSED), (Outcome.PASSED, Outcome.FAILED)]
    )
    (new,), (mended,) = (after.failed_checks, before.failed_checks)

    assert [
        f"fails now: `{new}`",
        f"fails no more: `{mended}`, and its rule is kept",
    ] == changes(before, after)


def test_a_store_that_could_not_be_run_is_a_change() -> None:
    before = Summary.of(run(Outcome.PASSED, Outcome.PASSED))

    assert ["it could not be run: see the log"] == changes(before, None)


def test_it_exits_with_1_if_anything_changed(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "runs" / "acme" / "TestAcme").mkdir(parents=True)
    summary = Summary.of(run(Outcome.PASSED, Outcome.PASSED))
    (tmp_path / "records" / "acme.json").write_text(summary.to_json(), encoding="utf-8")
    result = tmp_path / "runs" / "acme" / "TestAcme" / "result.json"

    for second, code in [(Outcome.PASSED, 0), (Outcome.FAILED, 1)]:
        result.write_text(run(Outcome.PASSED, second).to_json(), encoding="utf-8")
        assert code == main(tmp_path / "records", tmp_path / "runs")
