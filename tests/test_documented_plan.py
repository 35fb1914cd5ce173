"""The commands in docs/capacity-planning.md run, print what the page quotes, and agree."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from hicache_storage.cli import main
from hicache_storage.keys import page_hashes
from hicache_storage.replay.trace import block_tokens, synthetic_trace
from hicache_storage.request_log import TraceRecorder
from hicache_storage.request_log.log_file import LogFile

PAGE = (Path(__file__).parents[1] / "docs" / "capacity-planning.md").read_text(encoding="utf-8")
BLOCKS = [
    shlex.split(block.replace("\\\n", " "))[1:]
    for block in re.findall(r"^```sh\n(hicache .*?)^```", PAGE, re.DOTALL | re.MULTILINE)
]
(RECORDED,) = (command for command in BLOCKS if "--trace" in command)
(TIERED,) = (command for command in BLOCKS if "--tier" in command)
COMMANDS = [command for command in BLOCKS if command not in (RECORDED, TIERED)]
(MERGE,) = re.findall(r"^```sh\n(sort .*?)\n```", PAGE, re.DOTALL | re.MULTILINE)
_TEXTS = re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
(TIERS,) = (text for text in _TEXTS if "serves" in text)
OUTPUTS = [text for text in _TEXTS if text != TIERS]


@pytest.fixture(autouse=True)
def no_colour(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run in an own directory, without the variables that make rich treat a file as a terminal."""
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


def test_the_page_quotes_the_table_of_tiers(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(TIERED) == 0

    assert TIERS in capfd.readouterr().out


def test_the_replay_finds_what_the_plan_says() -> None:
    assert main([*COMMANDS[1], "--json", "plan.json"]) == 0
    assert main(COMMANDS[2]) == 0

    (option,) = json.loads(Path("plan.json").read_text())["options"]
    blocks = json.loads(Path("replay.json").read_text())["blocks"]
    for tier in ("l2", "l3"):
        measured = blocks[f"{tier}_hits"] / blocks["total"]
        assert measured == pytest.approx(option[f"{tier}_hit_rate"], abs=0.005)


def test_a_recorded_trace_has_the_plan_of_its_requests() -> None:
    """Two engines each record half of the requests, and the merged trace has all of them."""
    clock = itertools.count(1_700_000_000_000_000_000, 1_000_000)
    engines = [
        TraceRecorder(
            LogFile(Path(f"trace-{number}.jsonl"), 1 << 30, alone=True),
            64,
            clock=lambda: next(clock),
        )
        for number in range(2)
    ]
    for number, request in enumerate(synthetic_trace(1, conversations=100)):
        engines[number % 2].record(page_hashes(block_tokens(request.blocks), 64))
    for engine in engines:
        engine.close()
        assert engine.dropped_requests == 0
    subprocess.run(MERGE, shell=True, check=True)  # noqa: S602 - the page's own command
    assert main(RECORDED) == 0
    assert main([*COMMANDS[1], "--json", "known.json"]) == 0

    recorded, known = (
        json.loads(Path(name).read_text())["options"] for name in ("plan.json", "known.json")
    )
    for tier in ("l2", "l3"):
        assert recorded[0][f"{tier}_hit_rate"] == known[0][f"{tier}_hit_rate"] > 0
