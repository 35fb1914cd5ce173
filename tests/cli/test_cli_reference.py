"""docs/cli-reference.md is what the parsers say."""

from __future__ import annotations

import re

import cli_page
from servers import ROOT

PAGE = (ROOT / "docs" / "cli-reference.md").read_text(encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    assert cli_page.page() == PAGE, "run `make cli-page`"


def test_every_verb_has_a_section() -> None:
    verbs = [
        f"{program.name} {verb.__name__.rpartition('.')[2]}"
        for program in cli_page.PROGRAMS
        for verb in program.verbs
    ]

    assert verbs == re.findall(r"^### `(.*)`$", PAGE, re.MULTILINE)
