"""The table of several runs: one row per rule, one column per store."""

from __future__ import annotations

from pathlib import Path

import pytest
import records
from hicache_conformance.cli import main
from hicache_conformance.report.matrix import matrix
from hicache_conformance.report.record import Record
from hicache_conformance.report.summary import Summary
from hicache_conformance.run.outcomes import Outcome

KEPT = records.check_record("KV-002", Outcome.PASSED)


def table(*runs: Record) -> str:
    return matrix([Summary.of(run) for run in runs])


def test_each_store_has_a_column_and_each_rule_a_row() -> None:
    one = records.record(KEPT, name="one")
    other = records.record(KEPT, records.check_record("KV-003", Outcome.FAILED), name="other")

    lines = table(one, other).splitlines()

    assert "|  | rule | one | other |" == lines[0]
    assert "| KV-002 | What was set is there | kept | kept |" == lines[5]
    assert "| KV-003 | A hit is exactly the bytes that were set |  | **broken** 0/1 |" == lines[6]


def test_a_broken_rule_shows_the_number_of_passed_checks() -> None:
    checks = [records.check_record("KV-002", Outcome.PASSED, name) for name in ("a", "b")]
    failed = records.check_record("KV-002", Outcome.FAILED, "c")
    unasked = records.check_record("KV-002", Outcome.NOT_VERIFIED, "d")

    assert "**broken** 2/3" in table(records.record(*checks, failed, unasked))


def test_the_verdict_is_above() -> None:
    assert "|  | verdict | conformant |" in table(records.record(KEPT))


def test_a_bar_in_a_name_ends_no_cell() -> None:
    assert "a\\|b" in table(records.record(KEPT, name="a|b"))


def test_the_verb_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = records.record(KEPT)
    (tmp_path / "a.json").write_text(run.to_json(), encoding="utf-8")

    assert 0 == main(["matrix", str(tmp_path / "a.json")])
    assert table(run) == capsys.readouterr().out
