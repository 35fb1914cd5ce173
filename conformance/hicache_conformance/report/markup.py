"""Elements of the HTML page: sentences with code in them, and symbols."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.markup import element
from hicache_storage.storage import HiCacheStorage

if TYPE_CHECKING:
    from xml.etree import ElementTree as ET

    from hicache_storage.markup import Child


def prose(text: str) -> list[Child]:
    """Return the elements of a sentence in which `backticks` mark code."""
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
    """Return a symbol. The text next to it says what it means."""
    use = element("use", href=f"#icon-{name}")
    return element("svg", use, class_="icon", aria_hidden="true", focusable="false")
