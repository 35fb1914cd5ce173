"""Build a report as one self-contained HTML page: a lead, sections, plots and tables."""

from __future__ import annotations

from html import escape
from importlib import resources
from string import Template
from typing import TYPE_CHECKING

from hicache_storage.markup import element, link, table, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from xml.etree.ElementTree import Element

    from hicache_storage.markup import Child


def report_page(*, title: str, hero: Element, sections: Sequence[Element], footer: str) -> str:
    """Return the whole page. It loads nothing, and its policy forbids a browser to load anything."""
    contents = element(
        "nav",
        element(
            "ul",
            *(
                element("li", link(section[0].text or "", f"#{section.get('id')}"))
                for section in sections
            ),
        ),
        aria_label="Contents",
    )
    template = resources.files("hicache_storage").joinpath("report_page.html.in")
    return Template(template.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        hero=text_of([hero]),
        contents=text_of([contents]),
        sections=text_of(sections),
        footer=text_of([element("p", footer)]),
    )


def hero(*, eyebrow: str, title: str, lead: str, notes: Sequence[str]) -> Element:
    """Return the head of a page: its kind, its title, the result in a sentence, and notes."""
    return element(
        "div",
        element("p", eyebrow, class_="eyebrow"),
        element("h1", title),
        element("p", lead, class_="lead"),
        *(element("p", note, class_="note") for note in notes),
        class_="wrap",
    )


def section(name: str, title: str, intro: str | None, *children: Child) -> Element:
    """Return a section of the page with a heading, an introduction and its content."""
    return element(
        "section",
        element("h2", title, id=f"{name}-title"),
        element("p", intro, class_="intro") if intro else None,
        *children,
        id=name,
        aria_labelledby=f"{name}-title",
    )


def figures(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, best: int | None = None
) -> Element:
    """Return a table of figures. The row with the index `best` is highlighted."""
    made = table(titles, [tuple(row) for row in rows], "figures")
    for number, row in enumerate(made[1]):
        if number == best:
            row.set("class", "best")
    return element("div", made, class_="scroll")


def fact_list(facts: Sequence[tuple[str, str]]) -> Element:
    """Return a list of names, with one fact after each name."""
    items = (element("div", element("dt", name), element("dd", text)) for name, text in facts)
    return element("dl", *items, class_="facts")
