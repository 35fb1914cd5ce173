"""Pages of the site for files of the repository outside `docs/`, and links that lead to them.

A file has its path in the repository: `docs/guide.md`, `examples/dict_backend.py`. A page of the site
has MkDocs' name for it: `guide.md`, `repository/examples/dict_backend.py.md`.
"""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

FOLDER = "repository"
_DOCS = "docs/"
_CODE = re.compile(r"(^```.*?^```[^\n]*$|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r'(\]\(|\bsrc(?:set)?=")(?!/)([^)#:\s"]+)(?=(?:#[^)\s]*)?[)"])')
_LEXERS = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "bash", ".txt": "text"}


def site_page(path: str) -> str:
    """Return the page of the site for a file or a folder of the repository."""
    if path.startswith(_DOCS):
        name = path.removeprefix(_DOCS)
        return name if "." in posixpath.basename(name) else posixpath.join(name, "index.md")
    return posixpath.join(FOLDER, path if path.endswith(".md") else f"{path}.md")


def repository_path(page: str) -> str:
    """Return the path in the repository of a page of the site."""
    if not page.startswith(f"{FOLDER}/"):
        return _DOCS + page
    path = page.removeprefix(f"{FOLDER}/")
    return path.removesuffix(".md") if "." in posixpath.basename(path)[:-3] else path


def linked_files(root: Path, pages: Iterable[str]) -> list[str]:
    """Return the files outside `docs/` that these pages lead to, directly or over other such files."""
    found: dict[str, None] = {}
    left = list(pages)
    while left:
        path = left.pop()
        text = (root / path).read_text(encoding="utf-8") if path.endswith(".md") else ""
        for target in _targets(text, path):
            outside = not target.startswith((_DOCS, "../")) and (root / target).is_file()
            if outside and target not in found:
                found[target] = None
                left.append(target)
    return sorted(found)


def content(root: Path, path: str) -> str:
    """Return the Markdown of the page for a file. A program becomes a block of code."""
    text = (root / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    lexer = _LEXERS.get(posixpath.splitext(path)[1], "text")
    return f"# `{path}`\n\n````{lexer}\n{text}````\n"


def with_site_links(text: str, page: str) -> str:
    """Return the Markdown of a page with links to pages of the site where it links to the repository."""
    here = posixpath.dirname(page)

    def changed(path: str) -> str:
        return posixpath.relpath(site_page(path), here)

    return _changed_links(text, repository_path(page), changed)


def _targets(text: str, path: str) -> Iterator[str]:
    for part in _CODE.split(text)[::2]:
        for link in _LINK.finditer(part):
            yield _joined(path, link[2])


def _changed_links(text: str, path: str, changed: Callable[[str], str]) -> str:
    parts = _CODE.split(text)
    parts[::2] = [
        _LINK.sub(lambda link: link[1] + changed(_joined(path, link[2])), part)
        for part in parts[::2]
    ]
    return "".join(parts)


def _joined(path: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
