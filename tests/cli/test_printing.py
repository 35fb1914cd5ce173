"""Tables and lines on standard output."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest
from cli_stores import CliStore
from pages import space
from rich.table import Table
from verb_processes import COMMAND

from hicache_storage.cli.printing import output_console, print_lines
from hicache_storage.text_tables import text_table

_EVIL = "m\x1b[2J\x1b]52;c;eA==\x07\u202e\r"


def _parts() -> Iterator[Table | str]:
    table = Table()
    table.add_column("model")
    table.add_row(_EVIL, style="bold")
    yield table
    yield f"{_EVIL}\nthe next line"


@pytest.mark.parametrize("colour", ["", "1"])
def test_what_others_wrote_commands_no_terminal(
    colour: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", colour)

    print_lines(output_console(), _parts())

    text = capsys.readouterr().out
    for sequence in ("\x1b[2J", "\x1b]", "\x07", "\u202e", "\r"):
        assert sequence not in text
    assert "m\\x1b[2J" in text
    assert "\nthe next line\n" in text


def test_a_narrow_terminal_cuts_no_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a number is a wrong one. What may wrap, wraps between words."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    rows = [("2d0d6709", "1,344.1", "0.07", "some words")]

    print_lines(output_console(), [text_table(("space", "MiB/s", "s", "fact"), rows, "lrRL")])

    lines = capsys.readouterr().out.splitlines()
    assert [["2d0d6709", "1,344.1", "0.07", "some"], ["words"]] == [
        line.split() for line in lines[3:5]
    ]


def test_a_name_that_the_locale_lacks_is_escaped(file_store: CliStore) -> None:
    file_store.fill(range(1), space(model="\u30e2\u30c7\u30eb"))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}

    done = subprocess.run(
        [*COMMAND, "ls", *file_store.flags], env=environment, capture_output=True, check=False
    )

    assert (0, b"") == (done.returncode, done.stderr)
    assert rb"\u30e2\u30c7\u30eb" in done.stdout
