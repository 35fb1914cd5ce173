"""docs/metrics.md and the code name the same metrics."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from documents import code_blocks
from servers import ROOT

from hicache_storage.integrations.vllm._metrics import definitions
from hicache_storage.metrics import ViewCollector
from hicache_storage.page_store.call_durations import BUCKETS_S
from hicache_storage.page_store.results import Verdict

PAGE = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| `((?:hicache|vllm:)\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)


def documented(prefix: str) -> dict[str, tuple[str, set[str]]]:
    """Return type and labels of each metric on the page."""
    return {
        name: (kind, set(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", labels))))
        for name, kind, labels in _ROW.findall(PAGE)
        if name.startswith(prefix)
    }


def exposed(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name


def test_the_page_names_the_metrics_of_the_collector() -> None:
    described = {
        exposed(metric.name, metric.type): (metric.type, set(cast("Any", metric)._labelnames))
        for metric in ViewCollector().describe()
    }

    assert described == documented("hicache_")


def test_the_page_names_the_metrics_in_vllms_registry() -> None:
    def kind(name: str, **fields: Any) -> tuple[str, set[str]]:
        return name, {*fields["labelnames"]} - {"tier", "backend"}

    kinds = {name: partial(kind, name) for name in ("counter", "gauge", "histogram")}
    found = definitions(cast("Any", SimpleNamespace(**kinds)))

    expected = {exposed(name, metric[0]): metric for name, metric in found.items()}
    assert expected == documented("vllm:")


@pytest.mark.parametrize("verdict", sorted(set(Verdict) - {Verdict.NOT_ADMITTED}, key=str))
def test_the_page_names_every_verdict(verdict: Verdict) -> None:
    assert f"`{verdict.value}`" in PAGE


def test_the_page_names_the_buckets() -> None:
    assert (0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000) == tuple(
        round(limit * 1000, 3) for limit in BUCKETS_S
    )
    assert (
        "end at 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250 and 500 ms, and at 1, 2.5, 5 and 10 s" in PAGE
    )


def test_the_code_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for code in code_blocks(PAGE):
        exec(code, {})  # noqa: S102 - the page's own code

    assert "http://127.0.0.1:" in capsys.readouterr().out
