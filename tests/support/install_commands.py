"""`pip install` on the project's pages, written as `hicache_storage.errors.INSTALLED_FROM` says."""

from __future__ import annotations

import re
from pathlib import Path

from hicache_storage.errors import INSTALLED_FROM

ROOT = Path(__file__).parents[2]
_COMMAND = re.compile(r'(?<=pip install ")(?:\.|hicache-storage)(?=[\["])')
_LINE = re.compile(
    r'^( *pip install "(?:\.|hicache-storage)[^\n]*?)(?:  # in a clone)?$', re.MULTILINE
)


def pages() -> list[Path]:
    """Return the pages that a visitor reads. The changelog tells what was."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
    return sorted({*found, *ROOT.glob("deploy/**/*.md")} - {ROOT / "CHANGELOG.md"})


def written(text: str, source: str = INSTALLED_FROM) -> str:
    """Return a page with the commands that install the SDK from `source`."""
    place = "  # in a clone" if source == "." else ""
    return _LINE.sub(rf"\1{place}", _COMMAND.sub(source, text))


if __name__ == "__main__":
    for page in pages():
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
