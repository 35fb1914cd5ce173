"""A site with a dead link, a dead anchor or a request to another host is not built."""

from __future__ import annotations

from pathlib import Path

import hooks
import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config  # pyright: ignore[reportUnknownVariableType] - its keywords
from mkdocs.exceptions import Abort
from servers import ROOT

SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
LOCAL = '<script src="assets/a.js"></script><a href="https://example.org">out</a>'


def strict_settings() -> dict[str, object]:
    """Return the part of mkdocs.yml that makes warnings errors."""
    lines = [line for line in SETTINGS.splitlines() if "!!python" not in line]
    settings = yaml.safe_load("\n".join(lines))
    return {name: settings[name] for name in ("strict", "validation", "use_directory_urls")}


def built(directory: Path, page: str) -> str:
    """Build a site of one page with the project's settings. Return the page as HTML."""
    (directory / "docs").mkdir()
    (directory / "docs/index.md").write_text(page)
    (directory / "program.py").write_text("print('a program')\n")
    (directory / "mkdocs.yml").write_text(
        yaml.safe_dump(
            {
                "site_name": "a site",
                "theme": {"name": None, "custom_dir": "theme"},
                "hooks": [str(ROOT / "docs/site/hooks.py")],
                "plugins": [],
                **strict_settings(),
            }
        )
    )
    (directory / "theme").mkdir()
    (directory / "theme/main.html").write_text("{{ page.content }}")
    build(load_config(str(directory / "mkdocs.yml")))
    return (directory / "site/index.html").read_text()


def test_a_page_is_built_and_leads_to_the_page_of_a_program(tmp_path: Path) -> None:
    html = built(tmp_path, "# Title\n\n[program](../program.py), [here](#title)\n")

    assert 'href="repository/program.py.html"' in html
    assert "a program" in (tmp_path / "site/repository/program.py.html").read_text()


@pytest.mark.parametrize(
    "page",
    [
        "[gone](gone.md)",
        "[gone](../gone.py)",
        "[gone](#gone)",
        '<img src="https://example.org/a.png">',
        '<script src="//example.org/a.js"></script>',
    ],
)
def test_a_wrong_page_ends_the_build(page: str, tmp_path: Path) -> None:
    with pytest.raises(Abort, match="1 warning"):
        built(tmp_path, page)


def test_a_bar_in_code_in_a_table_has_no_backslash(tmp_path: Path) -> None:
    html = built(tmp_path, "| a | b |\n|---|---|\n| `x <y> \\| z` | word |\n")

    assert "<td><code>x &lt;y&gt; &#124; z</code></td>" in html.replace("|", "&#124;")


def test_a_link_is_no_request() -> None:
    assert [] == hooks.foreign_requests(LOCAL)


def test_a_foreign_font_is_a_request() -> None:
    html = '<link rel="stylesheet" href="https://fonts.example.org/css">'

    assert ["https://fonts.example.org/css"] == hooks.foreign_requests(html)


def test_names_in_tables_break_between_their_words() -> None:
    row = "<td><code>a_pageOfOne</code> a_page</td><p><code>a_page</code></p>"

    shown = hooks.with_breaks_in_names(row)

    assert shown == (
        "<td><code>a_<wbr>page<wbr>Of<wbr>One</code> a_page</td><p><code>a_page</code></p>"
    )
