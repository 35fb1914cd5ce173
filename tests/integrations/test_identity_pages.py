"""The pages that list what enters a key space agree with the adapters' tables."""

from __future__ import annotations

from pathlib import Path

import identity_page
import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("name", "text"), identity_page.pages().items(), ids=identity_page.pages())
def test_the_page_has_the_whole_table(name: str, text: str) -> None:
    assert text == (DOCS / name).read_text(encoding="utf-8"), "run `make identity-page`"
