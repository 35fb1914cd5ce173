"""Files of the repository outside `docs/` have a page on the site, and links lead there."""

from __future__ import annotations

import pytest
from repository_pages import content, linked_files, repository_path, site_page, with_site_links
from servers import ROOT


@pytest.mark.parametrize(
    ("path", "page"),
    [
        ("docs/guide.md", "guide.md"),
        ("docs/adr/", "adr/index.md"),
        ("docs/field/vllm-fs.json", "field/vllm-fs.json"),
        ("benchmarks/README.md", "repository/benchmarks/README.md"),
        ("examples/dict_backend.py", "repository/examples/dict_backend.py.md"),
    ],
)
def test_a_path_has_a_page(path: str, page: str) -> None:
    assert page == site_page(path)


@pytest.mark.parametrize("path", ["docs/guide.md", "CHANGELOG.md", "examples/dict_backend.py"])
def test_a_page_knows_its_path(path: str) -> None:
    assert path == repository_path(site_page(path))


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("ranks.md", "../examples/x.py", "repository/examples/x.py.md"),
        ("ranks.md", "guide.md#failures", "guide.md#failures"),
        (
            "backends/redis.md",
            "../../benchmarks/README.md#a",
            "../repository/benchmarks/README.md#a",
        ),
        ("repository/README.md", "docs/adr/", "../adr/index.md"),
        ("repository/README.md", "SECURITY.md", "SECURITY.md"),
        ("ranks.md", "#part", "#part"),
        ("ranks.md", "//example.org/a.md", "//example.org/a.md"),
        ("ranks.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)
def test_a_link_leads_to_the_page_of_the_site(page: str, link: str, expected: str) -> None:
    assert f"a [word]({expected})" == with_site_links(f"a [word]({link})", page)


def test_an_image_is_found_from_the_page() -> None:
    text = '<img src="docs/images/x.svg">'

    assert '<img src="../images/x.svg">' == with_site_links(text, "repository/README.md")


def test_code_is_left_as_it_is() -> None:
    text = "`[a](docs/b.md)`\n```\n[a](docs/b.md)\n```\n"

    assert text == with_site_links(text, "repository/README.md")


def test_files_are_found_over_other_files() -> None:
    found = linked_files(ROOT, ["docs/index.md"])

    assert {"README.md", "CHANGELOG.md", "SECURITY.md", "examples/dict_backend.py"} <= set(found)
    assert not [path for path in found if path.startswith("docs/")]


def test_the_page_of_a_program_is_its_code() -> None:
    page = content(ROOT, "examples/dict_backend.py")

    assert page.startswith("# `examples/dict_backend.py`\n\n````python\n")
    assert (ROOT / "examples/dict_backend.py").read_text() in page
