"""The programs that show broken rules with a store alone, and what is recorded of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from field.reproduce import PLANS, PROGRAMS, Sighting, sightings

FILES = sorted(PROGRAMS.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PROGRAMS)))
def test_a_program_has_at_most_thirty_lines_and_nothing_of_this_project(path: Path) -> None:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line]

    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100
    assert not [line for line in lines if "hicache_storage" in line and "sglang" not in line]
    assert not [line for line in lines if "hicache_conformance" in line or "from field" in line]


def test_each_program_is_run_for_a_store() -> None:
    planned = {program for plan in PLANS.values() for program in plan.programs}

    assert {str(path.relative_to(PROGRAMS).with_suffix("")) for path in FILES} == planned


def test_a_line_names_rules_and_says_whether_it_was_seen() -> None:
    output = "KV-404 KV-403: a flipped bit is a hit: True\nsomething else\nKV-105: aliases: False\n"

    assert [
        Sighting(("KV-404", "KV-403"), "a flipped bit is a hit", "damage", seen=True),
        Sighting(("KV-105",), "aliases", "damage", seen=False),
    ] == sightings("damage", output)
