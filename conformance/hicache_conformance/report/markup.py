"""HTML as a tree, so that no text gets into a page but as text."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from hicache_conformance.report.wording import printable
from hicache_storage.storage import HiCacheStorage

if TYPE_CHECKING:
    from collections.abc import Iterable

Child = ET.Element | str | None


def element(tag: str, *children: Child, **attributes: str) -> ET.Element:
    """An element; `class_` is its class, `aria_label` its `aria-label`, None no child at all."""
    made = ET.Element(tag, {_name(key): printable(value) for key, value in attributes.items()})
    for child in children:
        if isinstance(child, str):
            _append_text(made, printable(child))
        elif child is not None:
            made.append(child)
    return made


def prose(text: str) -> list[Child]:
    """A sentence in which `backticks` mark code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return [text]
    return [element("code", part) if place % 2 else part for place, part in enumerate(parts)]


def sentence(text: str) -> list[Child]:
    """Return `prose` that begins with a capital letter, unless its first word is an identifier."""
    word = text.partition(" ")[0]
    if hasattr(HiCacheStorage, word) or not word[:1].isalpha() or set(word) & set("_.(`"):
        return prose(text)
    return prose(text[:1].upper() + text[1:])


def icon(name: str) -> ET.Element:
    """One of the page's symbols. Only for the eye: what it says stands beside it in words."""
    use = element("use", href=f"#icon-{name}")
    return element("svg", use, class_="icon", aria_hidden="true", focusable="false")


def link(words: str, target: str) -> ET.Element:
    """A link, or plain words where the target is no web address and no place in the page."""
    if not target.startswith(("https://", "http://", "#")):
        return element("span", words)
    return element("a", words, href=target)


def table(heads: Iterable[str], rows: Iterable[tuple[Child, ...]], class_: str) -> ET.Element:
    """A table whose first column names its rows."""
    head = element("tr", *(element("th", one, scope="col") for one in heads))
    body = (
        element(
            "tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])
        )
        for row in rows
    )
    return element("table", element("thead", head), element("tbody", *body), class_=class_)


def text_of(nodes: Iterable[ET.Element]) -> str:
    """The HTML of some elements."""
    return "".join(ET.tostring(node, encoding="unicode", method="html") for node in nodes)


def _name(keyword: str) -> str:
    return keyword.rstrip("_").replace("_", "-")


def _append_text(parent: ET.Element, text: str) -> None:
    last = parent[-1] if len(parent) else None
    if last is None:
        parent.text = (parent.text or "") + text
    else:
        last.tail = (last.tail or "") + text
