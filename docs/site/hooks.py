"""Hooks of MkDocs: pages for files outside `docs/`, links to them, figures, and no foreign requests."""

from __future__ import annotations

import html
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from figures import with_figures
from mkdocs.structure.files import File, InclusionLevel
from repository_pages import content, linked_files, site_page, with_site_links

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_LOG = logging.getLogger("mkdocs.hooks.site")  # `strict` counts the warnings of MkDocs' loggers
_REQUEST = re.compile(
    r"<(?:script|link|img|iframe|source|object)\b[^>]*\b(?:src|srcset|href|data)=[\"']?"
    r"((?:https?:)?//[^\"'\s>]+)"
)
_BAR = r"\|"
_CODE_OF_CELL = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_CELL = re.compile(r"<td\b[^>]*>.*?</td>", re.DOTALL)
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=_)(?=\w)")
"""Where one word of a name ends and the next one begins."""
_BAR_IN_CODE = re.compile(r"(?<=[| ])`([^`\n]*\\\|[^`\n]*)`(?=[^\n]*\|$)", re.MULTILINE)
"""Code with an escaped bar in a row of a table."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each file outside `docs/` that a page links to."""
    root = Path(config.config_file_path).parent
    pages = [f"docs/{page.src_uri}" for page in files.documentation_pages()]
    for path in linked_files(root, pages):
        files.append(
            File.generated(
                config,
                site_page(path),
                content=content(root, path),
                inclusion=InclusionLevel.INCLUDED
                if path.endswith(".md")
                else InclusionLevel.NOT_IN_NAV,
            )
        )
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - the signature is MkDocs'
    """Draw the figures of a page, and lead its links to pages of the site."""
    return with_bars_in_code(with_site_links(with_figures(markdown), page.file.src_uri))


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:  # noqa: ARG001 - as above
    """Warn of everything that a browser would fetch from another host to show the page."""
    for request in foreign_requests(output):
        _LOG.warning("%s would fetch %s", page.file.src_uri, request)
    return with_breaks_in_names(output)


def with_breaks_in_names(output: str) -> str:
    """Let long names in table cells break between their words, and not at any letter."""
    return _CELL.sub(
        lambda cell: _CODE_OF_CELL.sub(lambda name: _WORDS.sub("<wbr>", name[0]), cell[0]), output
    )


def with_bars_in_code(markdown: str) -> str:
    """Return a page with HTML for code with an escaped bar: Python-Markdown keeps its backslash."""
    return _BAR_IN_CODE.sub(
        lambda code: (
            f"<code>{html.escape(code[1].replace(_BAR, '|')).replace('|', '&#124;')}</code>"
        ),
        markdown,
    )


def foreign_requests(output: str) -> list[str]:
    """Return the addresses on other hosts that a browser fetches to show a page."""
    return _REQUEST.findall(output)
