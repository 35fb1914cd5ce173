"""`--quiet` and `--log-format`: what the verbs print on stderr, and how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_stores import CliStore
from pages import space
from servers import free_port
from verb_processes import on_terminal

from hicache_storage.cli import main
from hicache_storage.cli.verbs import HICACHE

OLD = space(model="old-model")
REMOVAL = ["gc", "--model", "old-model", "--yes"]


@pytest.fixture
def store(file_store: CliStore) -> CliStore:
    """Return a store with a file that gives a warning, and with a key space to remove."""
    file_store.fill(range(2), OLD)
    (Path(file_store.config["path"]) / "model.safetensors").touch()
    return file_store


def test_messages_are_json(store: CliStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REMOVAL, *store.flags, "--log-format", "json"]) == 0

    warning, removed = map(json.loads, capsys.readouterr().err.splitlines())
    assert ("warning", "info") == (warning["level"], removed["level"])
    assert "model.safetensors" in warning["message"]
    assert removed["message"].startswith("removed key space ")
    assert {"at", "level", "logger", "message"} == {*warning} == {*removed}


def test_a_quiet_verb_prints_its_result_only(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*REMOVAL, *store.flags, "--quiet"]) == 0

    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.endswith("Removed 1 key space with 2 pages.\n")


@pytest.mark.parametrize("flags", [["--quiet"], ["--quiet", "--log-format", "json"]])
def test_errors_are_never_quiet(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    dead = CliStore("redis", {"url": f"redis://127.0.0.1:{free_port()}/0", "timeout_s": 1})

    assert main(["ls", *dead.flags, *flags]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    message = json.loads(line)["message"] if "json" in flags else line
    assert "127.0.0.1" in message


def test_the_format_of_one_run_is_not_that_of_the_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["ls", "--hicache-storage-backend", "memroy", "--log-format", "json"])
    main(["ls", "--hicache-storage-backend", "memroy"])

    first, second = capsys.readouterr().err.splitlines()
    assert "error" == json.loads(first)["level"]
    assert second.startswith("hicache: unknown storage backend 'memroy'")


@pytest.mark.parametrize("flag", [[], ["--quiet"]])
def test_a_quiet_verb_draws_no_progress(
    flag: list[str], file_store: CliStore, tmp_path: Path
) -> None:
    file_store.fill(range(4))

    code, output = on_terminal(tmp_path, "", "verify", *file_store.flags, *flag)

    assert code == 0
    assert ("\x1b" in output) is not bool(flag)


@pytest.mark.parametrize("verb", [one.__name__.rpartition(".")[2] for one in HICACHE.verbs])
def test_every_verb_has_the_flags(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])

    printed = capsys.readouterr().out
    assert "--quiet" in printed
    assert "--log-format" in printed
