"""The commands and the Python of the pages in docs/start run, and their output is right."""

from __future__ import annotations

import shlex
from pathlib import Path

import hicache_conformance.cli
import pytest
from cli_stores import CliStore
from documents import code_blocks
from pages import space
from servers import ROOT

import hicache_storage.cli

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in ROOT.glob("docs/start/*.md")}
PROGRAMS = {
    "hicache": hicache_storage.cli.main,
    "hicache-conformance": hicache_conformance.cli.main,
}
COMMANDS = [
    command
    for page in PAGES.values()
    for block in code_blocks(page, "sh")
    for command in block.replace("\\\n", " ").splitlines()
]
(CONFIG,) = code_blocks(PAGES["operator"], "yaml")
PYTHON = {name: block for name, page in PAGES.items() for block in code_blocks(page)}


def test_there_are_commands_and_python() -> None:
    assert {"hicache", "hicache-conformance"} == {shlex.split(one)[0] for one in COMMANDS}
    assert {"backend-author", "engine-developer"} == set(PYTHON)


@pytest.mark.parametrize("command", [one for one in COMMANDS if "--version" not in one])
def test_a_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("engine.yaml").write_text(CONFIG)
    CliStore("file", {"path": "pages"}).fill(range(1), space(model="old-model"))
    name, *argv = shlex.split(command)
    finds = "gc" in argv  # what it finds and leaves is told by its exit code

    assert finds == PROGRAMS[name](argv)


def test_a_backend_is_opened_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PYTHON["backend-author"], "backend-author.md", "exec"), {})  # noqa: S102 - our page

    assert capsys.readouterr().out.startswith("Capabilities(")


def test_an_engines_pages_arrive(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PYTHON["engine-developer"], "engine.md", "exec"), {})  # noqa: S102 - our page

    assert "4 of 4 pages arrived\n" == capsys.readouterr().out
