"""The README is short, its Python prints what the README shows, and its count of rules is right."""

from __future__ import annotations

import re
from pathlib import Path

import hicache_conformance.rules
import pytest
from documents import code_blocks, python_output
from servers import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = "\n".join(code_blocks(README))


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("command", ["git clone URL hicache-storage", "make demo ", "make test "])
def test_the_first_screen_has_the_commands_from_nothing(command: str) -> None:
    first_screen = README.splitlines()[:40]

    assert any(line.startswith(command) for line in first_screen)


def test_its_python_prints_what_it_says(tmp_path: Path) -> None:
    """The second block continues the first one."""
    output = python_output("-c", PYTHON, cwd=tmp_path)

    assert output.splitlines() == re.findall(r"print\(.*\)  # (.*)", PYTHON)


def test_it_counts_the_rules() -> None:
    assert f"{len(hicache_conformance.rules.RULES)} rules" in README
