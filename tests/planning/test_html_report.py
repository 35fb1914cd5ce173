"""The HTML page of a plan."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from hicache_storage.planning.html_report import html_page
from hicache_storage.planning.plan import make_plan
from hicache_storage.planning.settings import PlanSettings, Prices
from hicache_storage.replay.models import PRESETS
from hicache_storage.replay.trace import synthetic_trace

_VOID = {"meta", "link", "br"}


class _Tree(HTMLParser):
    """A parser that counts tags, and fails if a tag is not closed where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [value for name, value in attrs if name == "href" and value]

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop()


def _report(prices: Prices | None = None, **changes: Any) -> dict[str, Any]:
    settings = PlanSettings(
        model="m", pools=PRESETS["qwen3-8b"].pools, prices=prices or Prices(), **changes
    )
    return {"trace": "a/<trace>.jsonl", **make_plan(synthetic_trace(0, conversations=20), settings)}


@pytest.fixture(scope="module")
def page() -> str:
    return html_page(_report(Prices(prefill_tokens_per_s=8000.0, gpu_hour=2.0)))


def test_it_is_well_formed_and_its_links_lead_to_sections(page: str) -> None:
    tree = _Tree()
    tree.feed(page)

    assert not tree.open
    assert {"#hits", "#l2", "#l3", "#bandwidth", "#money", "#trace"} <= set(tree.links)
    assert {link[1:] for link in tree.links} <= set(tree.ids)


def test_it_loads_and_runs_nothing(page: str) -> None:
    assert "default-src 'none'" in page
    assert not re.search(r"<script|https?://|\bsrc=|url\(", page)


def test_texts_of_the_trace_are_escaped(page: str) -> None:
    assert "&lt;trace&gt;.jsonl" in page
    assert "<trace>" not in page


def test_the_best_option_stands_out(page: str) -> None:
    assert 2 == page.count('<tr class="best">')  # in the tables of hits and of money
    assert "pay most" in page


def test_there_are_three_plots(page: str) -> None:
    assert 3 == page.count("<svg ")


def test_without_prices_there_is_no_money() -> None:
    page = html_page(_report())

    assert 'id="money"' not in page
    assert "pay most" not in page


def test_without_l3_there_is_no_bandwidth() -> None:
    assert 'id="bandwidth"' not in html_page(_report(storage_sizes=(0,)))
