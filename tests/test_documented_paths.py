"""Paths and links on a page lead to existing files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = (
    "hicache_storage",
    "backends",
    "conformance",
    "tests",
    "benchmarks",
    "examples",
    "docs",
    "deploy",
)
_CODE = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`")
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")


def dead_ends(page: Path) -> Iterator[str]:
    """Yield each path in code marks, and each relative link, that leads nowhere.

    A path with `NAME` is skipped, because the reader replaces that word.
    """
    text = page.read_text(encoding="utf-8")
    for name in _CODE.findall(text):
        if "NAME" not in name and not (ROOT / name).exists():
            yield name
    for name in _LINK.findall(text):
        if not (page.parent / name).exists():
            yield name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_links_lead_somewhere(page: Path) -> None:
    assert [] == list(dead_ends(page))


def test_a_dead_end_is_named(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "[here](page.md), [there](gone.md#part), `tests/gone.py`, `tests/support`, [out](https://x)"
    )

    assert ["tests/gone.py", "gone.md"] == list(dead_ends(page))
