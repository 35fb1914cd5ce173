"""The commands in docs/cli.md run, and its tables name the verbs, reasons and exit codes that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from cli_stores import CliStore
from pages import hash_of, space

from hicache_storage.cli import _HICACHE, main
from hicache_storage.cli.operations.proofs import Proof
from hicache_storage.request_log import Operation, Reason, RequestRecord

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
(CONFIG,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [
    command
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for command in block.splitlines()
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("engine.yaml").write_text(CONFIG)
    Path("backup.yaml").write_text(CONFIG.replace('"pages"', '"backup"'))
    store = CliStore("file", {"path": "pages"})
    key_space = store.fill(range(12), space())
    store.fill(range(2), space(model="old-model"))
    store.fill(range(2), space(tenant="acme", revision="r1"))
    write_log(Path("explain.jsonl"))
    known = {"$SPACE": key_space.id[:8], "$HASH": hash_of(3)}
    program, *argv = (known.get(word, word) for word in shlex.split(command))

    assert program == "hicache"
    if "--compare" in argv:  # a shared machine may be slower the second time
        assert main([*argv[: argv.index("--compare")], "--json", "before.json"]) == 0
        assert main(argv) in (0, 1)
    else:
        shows_what_would_go = argv[0] == "gc" and "--yes" not in argv
        assert main(argv) == shows_what_would_go


def write_log(path: Path) -> None:
    """Write the record that the page tells of."""
    page_hash = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
    record = RequestRecord(
        at_s=1_000_000_000,
        engine="vllm",
        rank=0,
        operation=Operation.PREFETCH,
        request="chat-7",
        asked_pages=32,
        hit_pages=20,
        page=20,
        page_hash=page_hash,
        pool="group_0.FullAttentionSpec",
        reason=Reason.TIMEOUT,
        reasons={Reason.TIMEOUT: 3, Reason.ABSENT: 9},
        elapsed_s=0.0482,
    )
    path.write_text(record.line())


def test_the_story_is_what_the_page_quotes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path / "explain.jsonl")

    assert main(["explain", str(tmp_path / "explain.jsonl"), "--request", "chat-7"]) == 0

    assert capsys.readouterr().out in PAGE


def test_the_table_of_a_logs_reasons_is_complete() -> None:
    table = PAGE.partition("| reason | the first missing page |")[2]

    assert {reason.name.lower() for reason in Reason} <= set(re.findall(r"`(\w+)`", table))


def test_commands_of_every_verb_are_shown() -> None:
    elsewhere = {"backends", "plan", "replay"}
    verbs = {verb.__name__.rpartition(".")[2] for verb in _HICACHE.verbs} - elsewhere

    assert verbs == {shlex.split(command)[1] for command in COMMANDS}


def test_the_table_of_reasons_is_complete() -> None:
    named = set(
        re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`\w+`.*?) \|", PAGE, re.MULTILINE)))
    )

    assert {proof.value for proof in Proof} - {"ok"} <= named
