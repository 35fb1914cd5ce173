"""The Python in docs/controller.md runs, and the settings and sentences of the page exist."""

from __future__ import annotations

import re
from pathlib import Path

from documents import code_blocks, python_output

from hicache_storage.controller import ControllerSettings, Reason

GUIDE = (Path(__file__).parents[2] / "docs" / "controller.md").read_text(encoding="utf-8")
(BLOCK,) = code_blocks(GUIDE)


def test_the_guides_python_runs(tmp_path: Path) -> None:
    output = python_output("-c", BLOCK, cwd=tmp_path)

    assert "8 of 8 pages are usable (8 from host memory, 0 from storage)" in output


def test_the_settings_that_the_guide_names_are_there() -> None:
    rows = re.findall(r"^\| `(\w+)`(?:, `(\w+)`)? \|", GUIDE, re.MULTILINE)
    names = {name for row in rows for name in row if name.islower()}

    assert len(names) >= 6
    assert all(hasattr(ControllerSettings(), name) for name in names)


def test_the_sentences_that_the_guide_shows_are_produced() -> None:
    assert f"page 6 of pool 'draft' {Reason.ABSENT.value}" in GUIDE
    assert f"page 4 {Reason.OTHER_RANK.value} (rank 2)" in GUIDE
