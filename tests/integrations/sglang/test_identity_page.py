"""docs/sglang-identity.md is written from the table of SGLang's arguments."""

from __future__ import annotations

from pathlib import Path

import identity_page

PAGE = Path(__file__).parents[3] / "docs" / "sglang-identity.md"


def test_the_page_has_every_argument() -> None:
    assert identity_page.page() == PAGE.read_text(encoding="utf-8"), "run `make identity-page`"
