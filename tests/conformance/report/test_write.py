from __future__ import annotations

import json
from pathlib import Path

import pytest
from hicache_conformance.report.badge import badge_json
from hicache_conformance.report.html import html_report
from hicache_conformance.report.record import Record
from hicache_conformance.report.write import write_report
from hicache_conformance.run.outcomes import Outcome, Verdict
from report_samples import conformant, failed, record_of, rule_of

from hicache_storage.errors import ConfigError

NAMES = ["result.json", "junit.xml", "report.html", "badge.json"]


def test_every_form_is_written_and_nothing_else(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"

    paths = write_report(failed(), directory)

    assert [directory / name for name in NAMES] == paths
    assert sorted(paths) == sorted(directory.iterdir())


def test_the_record_is_read_back(tmp_path: Path) -> None:
    write_report(failed(), tmp_path)

    assert failed() == Record.read(tmp_path / "result.json")


def test_a_page_made_from_the_file_is_the_page(tmp_path: Path) -> None:
    write_report(failed(), tmp_path)

    again = html_report(Record.read(tmp_path / "result.json"))

    assert again == (tmp_path / "report.html").read_text(encoding="utf-8")


def test_an_older_report_is_replaced(tmp_path: Path) -> None:
    write_report(failed(), tmp_path)

    write_report(conformant(), tmp_path)

    assert Record.read(tmp_path / "result.json").verdict is Verdict.CONFORMANT
    assert len(list(tmp_path.iterdir())) == len(NAMES)


def test_a_report_that_fails_half_way_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(failed(), tmp_path)

    def torn(path: Path, text: str, encoding: str) -> int:
        path.write_bytes(text.encode(encoding)[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", torn)
    with pytest.raises(ConfigError, match="No space left on device"):
        write_report(conformant(), tmp_path)

    assert Record.read(tmp_path / "result.json").verdict is Verdict.FAILED
    assert len(list(tmp_path.iterdir())) == len(NAMES)


def test_a_directory_that_is_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")

    with pytest.raises(ConfigError, match=r"can't be written to .*out: File exists"):
        write_report(failed(), tmp_path / "out")


@pytest.mark.parametrize(
    ("verdict", "colour"),
    [
        (Verdict.CONFORMANT, "brightgreen"),
        (Verdict.PARTIAL, "yellow"),
        (Verdict.FAILED, "red"),
        (Verdict.INCONCLUSIVE, "lightgrey"),
    ],
)
def test_a_badge_shows_the_verdict(verdict: Verdict, colour: str) -> None:
    assert json.loads(badge_json(record_of(verdict=verdict))) == {
        "schemaVersion": 1,
        "label": "hicache conformance",
        "message": f"{verdict.value} (rules 1.0)",
        "color": colour,
    }


def test_a_badge_of_a_partial_run_is_marked_as_partial() -> None:
    badge = json.loads(badge_json(record_of(quick=True, selection=("KV-1*",))))

    assert badge["message"] == "conformant (rules 1.0, quick, some rules only)"


def test_a_badge_of_a_verdict_with_a_gap_has_the_gap_and_is_not_green() -> None:
    gaps = (rule_of("KV-307", Outcome.PARTLY), rule_of("KV-403", Outcome.NOT_VERIFIED))

    badge = json.loads(badge_json(record_of(rule_of("KV-001"), *gaps)))

    assert "conformant, 1 rule tried in part, 1 rule not tried (rules 1.0)" == badge["message"]
    assert "yellow" == badge["color"]


def test_a_badge_of_some_checks_has_their_number() -> None:
    badge = json.loads(badge_json(record_of(verdict=Verdict.INCOMPLETE, ran=3, left_out=227)))

    assert "incomplete (rules 1.0, 3 of 230 checks)" == badge["message"]
