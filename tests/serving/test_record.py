"""The tables of docs/serving.md, written from what scenarios noted."""

from __future__ import annotations

import pytest
from serving.record import FAULTS, Note, with_notes

PAGE = """\
<!-- events vLLM -->

vLLM 0.32.0:

| store | event | answers | wrong | slowest, s | cached tokens | what else |
| --- | --- | --- | --- | --- | --- | --- |
| file | restart | 8 | 0 | 2.60 | 4,608 | of 4,608 |
| s3 | restart | 8 | 0 | 2.58 | 4,608 | of 4,608 |

<!-- end of events vLLM -->
"""


def noted(store: str, engine: str = "vLLM 0.32.0") -> Note:
    return Note(engine, store, "restart", 1000, 1, 2, 0.5, 0, {"pages": 7})


ROW = "| {} | restart | 1,000 | 2 and 1 failed | 0.50 | 0 | pages 7 |"


def test_without_notes_the_page_stays() -> None:
    assert PAGE == with_notes(PAGE, [])


@pytest.mark.parametrize("store", ["file", "redis", "s3"])
def test_a_note_replaces_or_adds_one_row(store: str) -> None:
    rows = {line.split()[1]: line for line in PAGE.splitlines()[6:8]} | {store: ROW.format(store)}
    lines = with_notes(PAGE, [noted(store)]).splitlines()

    assert [rows[name] for name in sorted(rows)] == lines[6 : 6 + len(rows)]


def test_rows_of_another_version_go() -> None:
    page = with_notes(PAGE, [noted("file", "vLLM 0.33.0")])

    assert "vLLM 0.33.0:" in page
    assert [ROW.format("file")] == page.splitlines()[6:7]
    assert "2.58" not in page


def test_faults_have_a_table_of_their_own_below_the_other_events() -> None:
    values: list[float | str] = [0.4, "not within 60"]
    facts = dict(zip(FAULTS, values, strict=True)) | {"loaded_in_calm": 7680}
    fault = Note("vLLM 0.32.0", "redis", "killed", 9, 0, 0, 1.5, 64, facts)
    page = with_notes(PAGE, [fault])
    once, head, line, row = page.splitlines()[8:12]

    assert ("", "| --- |") == (once, line[:7])
    assert head.endswith("| slowest in calm, s | loads again after, s |")
    assert row == "| redis | killed | 9 | 0 | 1.50 | 64 | 0.4 | not within 60 |"
    assert page == with_notes(page, [fault])
