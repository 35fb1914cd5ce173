"""Mutants of modules and the tests that kill them, as recorded in tests/kills.json."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kills import Mutant, Switch, cover, mutate

RECORD = Path(__file__).with_name("kills.json")
TOOL = Path(__file__).with_name("support") / "kills.py"
SOURCE = '''
def answer(a, b):
    """Return an answer."""
    found = []
    if a:
        found.append(f"{b}")
    while b < 3:
        b += 1
    return found or -b
'''


def answers() -> tuple[list[Mutant], Callable[[int], Any]]:
    """Return the mutants of a source, and a function that returns its answer with one of them on."""
    mutants: list[Mutant] = []
    switch = Switch()
    names: dict[str, Any] = {"__kill__": switch}
    exec(mutate(SOURCE, "answers", "answers.py", mutants), names)  # noqa: S102 - written above

    def answer(number: int) -> Any:
        switch.active = number
        return names["answer"](0, 2)

    return mutants, answer


def test_each_expression_and_statement_of_a_function_has_a_mutant() -> None:
    assert [
        (5, "a -> not a"),
        (6, "without found.append(f'{b}')"),
        (6, "f'{b}' -> '~'"),
        (7, "b < 3 -> b <= 3"),
        (7, "3 -> 4"),
        (8, "without b += 1"),
        (8, "1 -> 2"),
        (9, "found or -b -> None"),
        (9, "found or -b -> found and -b"),
        (9, "-b -> b"),
    ] == [(mutant.line, mutant.change) for mutant in answers()[0]]


@pytest.mark.parametrize(
    ("number", "expected"),
    [(-1, -3), (0, ["2"]), (3, -4), (4, -4), (6, -4), (7, None), (8, []), (9, 3)],
)
def test_a_mutant_changes_the_code_when_it_is_on(number: int, expected: object) -> None:
    assert expected == answers()[1](number)


def test_a_cover_takes_the_tests_with_the_most_kills_a_line() -> None:
    kills = {"one": {1, 2}, "two": {2, 3, 4}, "three": {1, 2, 3, 4}, "none": set[int]()}

    assert ["two", "one"] == cover(kills, {"one": 2, "two": 2, "three": 40, "none": 1})


def recorded(module: str, path: Path, every: int = 1) -> dict[str, Any]:
    subprocess.run(
        [sys.executable, TOOL, module, "--every", str(every), "--record", path],
        cwd=TOOL.parents[2],
        check=True,
        capture_output=True,
    )
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))[module]["modules"]
    return found


def test_the_tool_finds_who_kills_the_mutants_of_a_module(tmp_path: Path) -> None:
    (found,) = recorded("hicache_storage/slot_allocator.py", tmp_path / "kills.json").values()

    assert {"tests/test_slot_allocator.py": found["killed"]} == found["by"]
    assert 0.5 < found["killed"] / found["mutants"] < 1


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("module", json.loads(RECORD.read_text("utf-8")))
def test_no_module_lost_a_kill(module: str, tmp_path: Path) -> None:
    """No more mutants survive than the record says. `make kills` shows which ones survive."""
    record = json.loads(RECORD.read_text("utf-8"))[module]
    found = recorded(module, tmp_path / "kills.json", record["every"])

    lost = {
        name
        for name, was in record["modules"].items()
        if survivors(found.get(name)) > survivors(was)
    }
    assert set() == lost, "more mutants survive than before"


def survivors(module: dict[str, Any] | None) -> int:
    return module["mutants"] - module["killed"] if module else 0
