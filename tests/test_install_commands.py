"""Pages and messages install the SDK from where it is: from a clone, until an index has a release."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from install_commands import pages, written
from servers import ROOT

from hicache_storage import errors
from hicache_storage.errors import install_command

FROM_AN_INDEX = re.compile(
    r"(?:pip install|pip download|pipx (?:run|install)|uv (?:add|tool install|pip install)|uvx)\s+"
    r"[^\n`]*?(?<![./\w-])hicache-storage(?=[\s\[\"'`]|$)"
)
CODE = [
    path
    for folder in ("hicache_storage", "backends", "conformance", "examples", "deploy")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".yaml", ".yml", ".service"}
]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_the_commands_of_this_release(page: Path) -> None:
    """If it fails, run `make install-commands`."""
    text = page.read_text(encoding="utf-8")

    assert text == written(text)
    assert errors.INSTALLED_FROM != "." or not FROM_AN_INDEX.findall(text)


def test_no_message_has_a_command_of_its_own() -> None:
    found = [path for path in CODE if FROM_AN_INDEX.search(path.read_text(encoding="utf-8"))]

    assert not found


@pytest.mark.parametrize(
    ("clone", "index"),
    [
        ('pip install ".[redis]"  # in a clone\n', 'pip install "hicache-storage[redis]"\n'),
        (
            '    pip install ".[a,b]" s3fs  # in a clone',
            '    pip install "hicache-storage[a,b]" s3fs',
        ),
        (
            'run `pip install ".[x]"` in the clone',
            'run `pip install "hicache-storage[x]"` in the clone',
        ),
    ],
)
def test_a_release_rewrites_a_page_and_back(clone: str, index: str) -> None:
    assert index == written(clone, "hicache-storage")
    assert clone == written(index, ".")


@pytest.mark.parametrize(
    ("source", "command"),
    [
        (".", 'pip install ".[redis]" (in a clone of hicache-storage)'),
        ("hicache-storage", 'pip install "hicache-storage[redis]"'),
    ],
)
def test_a_message_has_the_same_command(
    source: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "INSTALLED_FROM", source)

    assert command == install_command("redis")


@pytest.mark.parametrize(
    "line",
    [
        "pip install hicache-storage",
        'pip install "hicache-storage[redis]"',
        "uvx hicache-storage --version",
        "pipx run --spec hicache-storage hicache",
    ],
)
def test_the_form_of_an_index_is_found(line: str) -> None:
    assert FROM_AN_INDEX.search(line)
