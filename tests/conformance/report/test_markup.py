"""Sentences with code, and symbols, as elements of the HTML report."""

from __future__ import annotations

from importlib import resources

import pytest
from hicache_conformance.report.markup import sentence

from hicache_storage.markup import element, text_of


def _shown(text: str) -> str:
    return text_of([element("p", *sentence(text))])


@pytest.mark.parametrize(
    "text",
    [
        "from_config accepts an unknown field",
        "batch_set of another page changed this one",
        "scan must yield PageInfo",
        "clear() returned 3",
        "hicache_acme.storage cannot be imported",
        "8 threads are left behind",
        "",
    ],
)
def test_an_identifier_at_the_start_keeps_its_letters(text: str) -> None:
    assert f"<p>{text}</p>" == _shown(text)


def test_a_word_at_the_start_gets_a_capital_letter() -> None:
    assert "<p>A call did not return</p>" == _shown("a call did not return")


def test_no_message_is_capitalised_by_the_style_sheet() -> None:
    template = resources.files("hicache_conformance.report").joinpath("report.html.in")
    rules = template.read_text(encoding="utf-8").splitlines()

    capitalised = [rule.partition("::")[0] for rule in rules if "first-letter" in rule]

    assert [".claims tbody th"] == capitalised  # names of capabilities, in words
