"""Build the HTML of reports as a tree, so that every text is escaped."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Iterable

Child = ET.Element | str | None

_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Characters that must never be shown: control characters, and characters that reorder a line."""


def printable(text: str) -> str:
    """Return `text` with unprintable characters escaped, because names in a store may have any bytes."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def element(tag: str, *children: Child, **attributes: str) -> ET.Element:
    """Return an element. `class_` and `aria_label` set `class` and `aria-label`. Skip None."""
    made = ET.Element(tag, {_name(key): printable(value) for key, value in attributes.items()})
    for child in children:
        if isinstance(child, str):
            _append_text(made, printable(child))
        elif child is not None:
            made.append(child)
    return made


def link(words: str, target: str) -> ET.Element:
    """Return a link, or plain text if the target is neither a web address nor a place in the page."""
    if not target.startswith(("https://", "http://", "#")):
        return element("span", words)
    return element("a", words, href=target)


def table(heads: Iterable[str], rows: Iterable[tuple[Child, ...]], class_: str) -> ET.Element:
    """Return a table whose first column names its rows."""
    head = element("tr", *(element("th", one, scope="col") for one in heads))
    body = (
        element(
            "tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])
        )
        for row in rows
    )
    return element("table", element("thead", head), element("tbody", *body), class_=class_)


def text_of(nodes: Iterable[ET.Element]) -> str:
    """Return the HTML of some elements."""
    return "".join(ET.tostring(node, encoding="unicode", method="html") for node in nodes)


def _name(keyword: str) -> str:
    return keyword.rstrip("_").replace("_", "-")


def _append_text(parent: ET.Element, text: str) -> None:
    last = parent[-1] if len(parent) else None
    if last is None:
        parent.text = (parent.text or "") + text
    else:
        last.tail = (last.tail or "") + text
