"""HTML as a tree: escapes, attributes, links, tables."""

from __future__ import annotations

from hicache_storage.markup import element, link, printable, table, text_of


def test_control_characters_are_shown_as_escapes() -> None:
    assert printable("a\x1b[31m\x00\u202e\tü\n") == r"a\x1b[31m\x00\u202e" + "\tü\n"


def test_texts_and_attributes_are_escaped() -> None:
    made = element("p", "<b>", element("i", "&"), "rest", None, title='"')

    assert '<p title="&quot;">&lt;b&gt;<i>&amp;</i>rest</p>' == text_of([made])


def test_keywords_become_attribute_names() -> None:
    assert '<b class="c" aria-label="l"></b>' == text_of([element("b", class_="c", aria_label="l")])


def test_only_web_addresses_and_places_of_the_page_are_links() -> None:
    assert '<a href="#x">w</a>' == text_of([link("w", "#x")])
    assert "<span>w</span>" == text_of([link("w", "javascript:alert(1)")])


def test_the_first_cell_names_its_row() -> None:
    shown = text_of([table(("a", "b"), [("1", "2")], "figures")])

    assert '<th scope="row">1</th><td>2</td>' in shown
