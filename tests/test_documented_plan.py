"""The commands in docs/capacity-planning.md run, print what the page quotes, and agree."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from hicache_storage.cli import main

PAGE = (Path(__file__).parents[1] / "docs" / "capacity-planning.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(block.replace("\\\n", " "))[1:]
    for block in re.findall(r"^```sh\n(hicache .*?)^```", PAGE, re.DOTALL | re.MULTILINE)
]
OUTPUTS = re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def no_colour(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run in a directory of its own. Remove the variables that make rich take a file for a terminal."""
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def test_there_are_two_plans_and_a_replay() -> None:
    assert ["plan", "plan", "replay"] == [command[0] for command in COMMANDS]
    assert 2 == len(OUTPUTS)


@pytest.mark.parametrize("number", [0, 1])
def test_a_plan_prints_what_the_page_quotes(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(COMMANDS[number]) == 0

    assert OUTPUTS[number].strip("\n") == capfd.readouterr().out.strip("\n")


def test_the_replay_finds_what_the_plan_says() -> None:
    assert main([*COMMANDS[1], "--json", "plan.json"]) == 0
    assert main(COMMANDS[2]) == 0

    (option,) = json.loads(Path("plan.json").read_text())["options"]
    blocks = json.loads(Path("replay.json").read_text())["blocks"]
    for tier in ("l2", "l3"):
        measured = blocks[f"{tier}_hits"] / blocks["total"]
        assert measured == pytest.approx(option[f"{tier}_hit_rate"], abs=0.005)
